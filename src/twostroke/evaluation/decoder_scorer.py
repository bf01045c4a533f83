"""Scores with the decoder, training's definition of the model, in batches of sequences of similar length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from twostroke.core.errors import CapacityError, InputError, TwostrokeError
from twostroke.core.policy import SCORED_TOKENS_PER_PASS
from twostroke.core.units import format_bytes
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.engine.memory import available_bytes
from twostroke.engine.scoring import TokenScores, check_ids
from twostroke.evaluation.decoder_pass import Pass, device_of, hidden_of_each, in_eval_mode, score_passes
from twostroke.evaluation.scorer import Progress
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model, open_weights, torch_dtype
from twostroke.model.streamed import stream_model
from twostroke.planner.work.params import count_parameters


class DecoderScorer:
    """A ``Scorer`` on the decoder. Rows of a batch are padded on the right, where causal attention never looks, so no mask is
    needed."""

    engine = "decoder"

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        self.decoder, self.tokenizer, self.spec = decoder, tokenizer, decoder.spec
        self.longest = decoder.spec.max_positions
        held = next(decoder.parameters()).dtype
        self.dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[held]
        self.formats = self.dtype

    @classmethod
    def load(
        cls, directory: Path, dtype: str = "fp32", device: str = "cpu", layer_by_layer: bool = False, replicas: int = 1
    ) -> DecoderScorer:
        """``layer_by_layer``: only the layer that is computed is in memory (``model.streamed``). So many ``replicas`` share the
        machine's memory. Raises CapacityError if they do not fit, and the errors of loading."""
        if layer_by_layer:
            return cls(stream_model(directory, dtype, device), load_tokenizer(directory))
        if torch.device(device).type == "cpu":
            _require_room(directory, dtype, replicas)
        return cls(load_model(directory, dtype, device), load_tokenizer(directory))

    def token_scores(
        self, sequences: Sequence[tuple[Sequence[int], int]], progress: Progress | None = None
    ) -> list[TokenScores]:
        """As ``engine.scoring.token_scores``; tests/evaluation/test_scorers.py compares the two."""
        for ids, first in sequences:
            self._check(ids, first)
        results: list[TokenScores] = [(np.empty(0, np.float32), np.empty(0, np.bool_))] * len(sequences)
        # The longest go first, so that a lack of memory shows at once and not at the end.
        order = sorted((i for i, (ids, first) in enumerate(sequences) if first < len(ids)), key=lambda i: -len(sequences[i][0]))
        batches = list(self._batches(order, sequences))
        n_total, n_done = sum(len(sequences[i][0]) - 1 for i in order), 0
        passes = (_pass([sequences[i] for i in batch]) for batch in batches)
        for batch, (nats, greedy) in zip(batches, self.score_passes(passes), strict=True):
            if not np.isfinite(nats).all():
                raise TwostrokeError("the model's output was not finite. The weights may be damaged.")
            ends = np.cumsum([len(ids) - first for ids, first in (sequences[i] for i in batch)])[:-1]
            for i, scores in zip(batch, zip(np.split(nats, ends), np.split(greedy, ends), strict=True), strict=True):
                results[i] = scores
            n_done += sum(len(sequences[i][0]) - 1 for i in batch)
            if progress is not None:
                progress(n_done / n_total)
        return results

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = (), progress: Progress | None = None
    ) -> list[str]:
        """Greedy continuations without a KV cache, so each token costs a pass over all tokens before it. It is for short
        answers, and the reference for the other engine."""
        for prompt in prompts:
            self._check(prompt, 1)
        rows = [list(prompt) for prompt in prompts]
        writers = [IncrementalDetokenizer(self.tokenizer, tuple(stop), (), 0, ids) for ids in rows]
        texts = [""] * len(rows)
        unfinished = list(range(len(rows)))
        while unfinished:
            going = [i for i in unfinished if len(rows[i]) < min(len(prompts[i]) + max_tokens, self.longest)]
            found = dict(zip(going, self.next_tokens([rows[i] for i in going]) if going else [], strict=True))
            for i in unfinished:
                if i not in found or found[i] in self.spec.eos_token_ids:
                    texts[i] += writers[i].finish()
                    continue
                rows[i].append(found[i])
                texts[i] += writers[i].add([found[i]])
            unfinished = [i for i in going if found[i] not in self.spec.eos_token_ids and not writers[i].stopped]
            if progress is not None:
                progress(1 - len(unfinished) / len(rows))
        return texts

    def score_passes(self, passes: Iterable[Pass]) -> Iterator[TokenScores]:
        """The scores of ``passes``, in their order."""
        return score_passes(self.decoder, passes)

    @torch.no_grad()
    def next_tokens(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The most probable token behind each of ``rows``, which are computed one by one."""
        device = device_of(self.decoder)
        inputs = [(torch.tensor([ids], device=device), torch.arange(len(ids), device=device)[None], None) for ids in rows]
        with in_eval_mode(self.decoder):
            return [int(self.decoder.logits(hidden[0, -1]).argmax()) for hidden in hidden_of_each(self.decoder, inputs)]

    def _batches(self, order: Sequence[int], sequences: Sequence[tuple[Sequence[int], int]]) -> Iterator[Sequence[int]]:
        """``order``, longest sequences first, in runs of at most ``SCORED_TOKENS_PER_PASS`` tokens with their padding."""
        begin = 0
        while begin < len(order):
            length = len(sequences[order[begin]][0]) - 1
            yield order[begin : begin + max(1, SCORED_TOKENS_PER_PASS // length)]
            begin += max(1, SCORED_TOKENS_PER_PASS // length)

    def _check(self, ids: Sequence[int], first: int) -> None:
        check_ids(ids, first, self.spec.vocab_size)
        if len(ids) - 1 > self.longest:
            raise InputError(
                f"a sequence of {len(ids)} tokens is longer than the model's max_positions={self.longest} + 1. Cut it."
            )


def _require_room(directory: Path, dtype: str, replicas: int) -> None:
    needed = replicas * count_parameters(open_weights(directory)[0]).total * torch_dtype(dtype).itemsize
    if needed > (free := available_bytes()):
        whose = f"of {replicas} ranks " if replicas > 1 else ""
        raise CapacityError(
            f"the weights {whose}in {dtype} need {format_bytes(needed)}, and {format_bytes(free)} of memory is free. Have one "
            "layer in memory at a time with layer_by_layer, or use weights of fewer bits."
        )


def _pass(batch: Sequence[tuple[Sequence[int], int]]) -> Pass:
    """Sequences as rows of one pass, which scores each of them from its first scored token on."""
    length = max(len(ids) for ids, _ in batch) - 1
    tokens = np.zeros((len(batch), length), np.int64)
    for row, (ids, _) in enumerate(batch):
        tokens[row, : len(ids) - 1] = ids[:-1]
    rows = np.repeat(np.arange(len(batch)), [len(ids) - first for ids, first in batch])
    columns = np.concatenate([np.arange(first - 1, len(ids) - 1) for ids, first in batch])
    targets = np.concatenate([np.asarray(ids[first:], np.int64) for ids, first in batch])
    return Pass(tokens, rows, columns, targets, greedy=True)
