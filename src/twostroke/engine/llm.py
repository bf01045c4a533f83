"""``LLM``: a model to call from Python. ``LLM(directory).generate(prompts, SamplingParams(...))``, as in vLLM."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.core.engine_settings import OFF, EngineSettings
from twostroke.core.errors import DataError, EngineError, InputError
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.beam_outputs import BeamSearchOutput, BeamSearchParams
from twostroke.engine.core import EngineCore
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.engine.events import TokenEvent
from twostroke.engine.meters import EngineStats
from twostroke.engine.sampler import TokenLogprobs
from twostroke.scheduling.request import FinishReason
from twostroke.scheduling.sampling_params import Pooling, SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float32

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. ``text`` ends before a stop string or stop token; ``token_ids`` and ``logprobs`` include it.
    ``cumulative_logprob`` is the sum of its tokens' log-probabilities, if it was found by beam search."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds from the call of ``generate`` to a request's first token and to its last."""

    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """``prompt`` is None if token ids were given. ``outputs`` are the ``n`` answers. ``prompt_logprobs``, if asked for, begin
    with the prompt's second token."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Delta:
    """What answer ``answer`` to prompt ``index`` gained: tokens, and text that no later token can change, which may lag behind
    them. ``finish_reason`` is None until the answer ends."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    answer: int = 0


@dataclass
class _Answer:
    """An answer as it grows."""

    detokenizer: IncrementalDetokenizer | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cumulative_logprob: float | None = None


@dataclass
class _Open:
    """A request and its answers as they grow."""

    index: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    answers: list[_Answer]
    began: float
    lora: str | None = None
    text_at_end: bool = False
    """Nobody reads its pieces, so all tokens are decoded at once. Eight requests' step of a 1.4M model took 339 µs then, and
    405 with pieces (Zen 4)."""
    first: float = 0.0
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: Float32[np.ndarray, " E"] | None = None

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    def output(self) -> RequestOutput:
        now = time.perf_counter()
        completions = []
        for i, answer in enumerate(self.answers):
            assert answer.finish_reason is not None
            logprobs = answer.logprobs if self.params.logprobs is not None else None
            made = CompletionOutput(i, answer.text, answer.token_ids, logprobs, answer.finish_reason, answer.cumulative_logprob)
            completions.append(made)
        n_output = sum(len(answer.token_ids) for answer in self.answers)
        metrics = RequestMetrics((self.first or now) - self.began, now - self.began, len(self.prompt_ids), n_output)
        return RequestOutput(self.prompt, self.prompt_ids, completions, metrics, self.prompt_logprobs)


class LLM:
    """An engine in this process. ``model`` is a model directory, or the output of a training run.

    ``settings`` are fields of ``EngineSettings``, as ``dtype="int8"``; ``max_step_ratio`` is off unless it is given. ``loras``
    are directories of adapters in PEFT's layout by the names that prompts call them by; ``load_lora`` and ``unload_lora``
    change them later. Raises what ``EngineSettings`` and ``EngineCore`` raise. Without a ``tokenizer.json`` prompts must be
    token ids, and answers have no text. Torch's number of threads is set for the whole process.
    """

    def __init__(self, model: str | Path, loras: Mapping[str, str | Path] | None = None, **settings: Any) -> None:
        directory = Path(model)
        if not (directory / "config.json").is_file() and (directory / "model" / "config.json").is_file():
            directory = directory / "model"
        # Nobody reads along, so prompts need not wait for requests that decode: 16 of a 1.4M model got 10,000 tokens a second
        # so, and 8,600 with a server's bound (Zen 3).
        self.engine = EngineCore(directory, EngineSettings(**{"max_step_ratio": OFF, **settings}))
        self.directory = directory
        self.tokenizer = load_tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
        self._lengths: dict[bool, dict[int, int]] = {}  # shared by the detokenizers of all answers
        self._numbers = itertools.count()
        self._inbox: dict[str, list[TokenEvent]] = {}
        for name, adapter in (loras or {}).items():
            self.load_lora(name, adapter)

    def close(self) -> None:
        """Write what waits to be written to ``kv_dir``, if there is one, and let go of it. The end of the process does the
        same."""
        self.engine.close()

    def save_session(self, path: str | Path, conversation: Prompt) -> None:
        """Save the keys and values of ``conversation`` (a prompt and its answer, as text or as token ids) to a file, from which
        ``load_session`` puts them into the cache of another process. Raises what ``EngineCore.save_session`` raises."""
        self.engine.save_session(Path(path), self._ids(conversation))

    def load_session(self, path: str | Path) -> list[int]:
        """Tokens of a saved conversation, whose keys and values are in the cache from then on: prompts that begin with them
        compute at most a quarter of a page of them again. Raises what ``EngineCore.load_session`` raises."""
        return self.engine.load_session(Path(path))

    def load_lora(self, name: str, directory: str | Path) -> None:
        """Let prompts name the adapter in ``directory``. Raises what ``AdapterStore.add`` raises."""
        self.engine.load_adapter(name, directory)

    def unload_lora(self, name: str) -> None:
        """Let no further prompt name it; those under way are answered. Raises InputError for an unknown name."""
        self.engine.unload_adapter(name)

    def load_weights(self, directory: str | Path) -> bool:
        """Compute with the weights in ``directory``, of the same shape, from now on. Answers under way (``stream``) finish on
        those before. Returns False if they are the same ones. Raises what ``EngineCore.prepare_weights`` raises; then the
        present ones stay."""
        prepared = self.engine.prepare_weights(directory)
        if prepared is not None:
            self.engine.use_weights(prepared)
        return prepared is not None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers to ``prompts``, in their order. A prompt is a text or a list of token ids; one alone counts as a list of one.

        ``params`` is one for all prompts, or one for each; the default is ``SamplingParams()``. ``lora`` likewise is the name
        of an adapter, None: the model as it is. Raises InputError, CapacityError or DataError for a prompt that cannot be
        answered, before anything is computed.
        """
        requests = self._start(prompts, params, lora)
        for request in requests:
            request.text_at_end = not request.params.stop
        outputs: list[RequestOutput] = []
        for _ in self._stream(requests, outputs):
            pass
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        into: list[RequestOutput] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> Iterator[Delta]:
        """The same piece by piece, as it is generated. At the end the whole answers are appended to ``into``.

        Closing the iterator cancels the requests that are unfinished. Errors come before the first piece.
        """
        yield from self._stream(self._start(prompts, params, lora), into)

    def _stream(self, requests: list[_Open], into: list[RequestOutput] | None) -> Iterator[Delta]:
        outputs: dict[int, RequestOutput] = {}
        for delta in self._run(requests):
            if delta.finish_reason is not None and requests[delta.index].finished:
                outputs[delta.index] = requests[delta.index].output()
            yield delta
        if into is not None:
            into += [outputs[i] for i in range(len(requests))]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``params.beam_width`` best answers to each prompt, as vLLM's method of this name gives them. ``generate`` with
        ``use_beam_search`` finds the same ones. Raises what ``generate`` raises."""
        return [BeamSearchOutput.of(output) for output in self.generate(prompts, params.sampling(), lora)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "mean",
        lora: str | Sequence[str | None] | None = None,
    ) -> Float32[np.ndarray, "n E"]:
        """A vector of Euclidean length 1 for each prompt: the mean of its hidden states after the final norm.

        With ``pooling`` "last" it is the hidden state of the last token. Prompts run together, as ``generate``'s do. Raises
        what ``generate`` raises, and EngineError for a prompt whose hidden states are not finite."""
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
        requests = self._start(prompts, params, lora)
        for _ in self._run(requests):
            pass
        found = np.zeros((len(requests), self.engine.spec.d_model), np.float32)
        for row, request in zip(found, requests, strict=True):
            if request.embedding is None:
                raise EngineError("the model's output was not finite. The weights may be damaged.")
            row[:] = request.embedding
        return found

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def _start(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora: str | Sequence[str | None] | None,
    ) -> list[_Open]:
        batch = _as_batch(prompts)
        each = (
            [params or SamplingParams()] * len(batch) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(each) != len(batch):
            raise InputError(f"{len(each)} sampling parameters for {len(batch)} prompts. Give one for all, or one for each.")
        loras = [lora] * len(batch) if lora is None or isinstance(lora, str) else list(lora)
        if len(loras) != len(batch):
            raise InputError(f"{len(loras)} names of adapters for {len(batch)} prompts. Give one for all, or one for each.")
        return [self._prepare(i, prompt, p, name) for i, (prompt, p, name) in enumerate(zip(batch, each, loras, strict=True))]

    def _prepare(self, index: int, prompt: Prompt, params: SamplingParams, lora: str | None) -> _Open:
        text, ids = prompt if isinstance(prompt, str) else None, self._ids(prompt)
        if self.tokenizer is None and params.stop:
            raise DataError(f"{self.directory} has no tokenizer.json, so stop strings cannot be found. Use stop_token_ids.")
        answers = [_Answer(self._detokenizer(params, ids)) for _ in range(params.n)]
        return _Open(index, text, ids, params, answers, time.perf_counter(), lora)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise DataError(
                    f"{self.directory} has no tokenizer.json, which a prompt of text needs. Add it, or give token ids."
                )
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise InputError("the prompt holds half of a surrogate pair, which is not a character.") from None
            return list(self.tokenizer.encode(prompt).ids)
        return list(prompt)

    def _detokenizer(self, params: SamplingParams, prompt_ids: list[int]) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer.of(self.tokenizer, params, self.engine.spec.eos_token_ids, prompt_ids, self._lengths)

    def _run(self, requests: list[_Open]) -> Iterator[Delta]:
        named = {f"{next(self._numbers)}": request for request in requests}
        open_ids: set[str] = set()
        try:
            for name, request in named.items():
                self.engine.add_request(name, request.prompt_ids, request.params, lora=request.lora)
                open_ids.add(name)
            while open_ids:
                for event in self._events(open_ids):
                    request = named[event.request_id]
                    if event.prompt_logprobs is not None:
                        request.prompt_logprobs = [*(request.prompt_logprobs or ()), *event.prompt_logprobs]
                        continue
                    request.first = request.first or time.perf_counter()
                    request.embedding = event.embedding
                    delta = _delta(request, event)
                    if delta.finish_reason is not None:
                        if request.finished:
                            open_ids.discard(event.request_id)
                        if event.finish_reason is None:  # a stop string, which the engine does not see
                            self.engine.abort(event.request_id, event.index)
                    yield delta
        finally:
            for name in open_ids:
                self.engine.abort(name)
                self._inbox.pop(name, None)

    def _events(self, mine: set[str]) -> list[TokenEvent]:
        """Events of the requests in ``mine``, from the inbox or else from a new step. Several iterators may share the engine:
        each puts the events of the others' requests into the inbox."""
        kept = [event for name in mine for event in self._inbox.pop(name, ())]
        if kept:
            return kept
        if not self.engine.has_work:
            raise EngineError(f"the engine lost {len(mine)} requests: it has no work, and they have not ended.")
        events = self.engine.step()
        for event in events:
            if event.request_id not in mine:
                self._inbox.setdefault(event.request_id, []).append(event)
        return [event for event in events if event.request_id in mine]


def _delta(request: _Open, event: TokenEvent) -> Delta:
    answer, finish_reason = request.answers[event.index], event.finish_reason
    token_ids, logprobs, text = event.token_ids, event.logprobs, ""
    if answer.detokenizer is not None and request.text_at_end:
        if finish_reason is not None:
            text = answer.detokenizer.add([*answer.token_ids, *token_ids]) + answer.detokenizer.finish()
    elif answer.detokenizer is not None:
        before = answer.detokenizer.n_tokens
        text = answer.detokenizer.add(token_ids)
        if answer.detokenizer.stopped:
            finish_reason = "stop"
            n_new = answer.detokenizer.n_tokens - before  # the engine does not see stop strings, so more may have come
            token_ids, logprobs = token_ids[:n_new], None if logprobs is None else logprobs[:n_new]
        elif finish_reason is not None:
            text += answer.detokenizer.finish()
    answer.token_ids += token_ids
    answer.logprobs += logprobs or []
    answer.text += text
    answer.finish_reason = finish_reason
    answer.cumulative_logprob = event.cumulative_logprob
    return Delta(request.index, text, token_ids, logprobs, finish_reason, event.index)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and isinstance(batch[0], int):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]
