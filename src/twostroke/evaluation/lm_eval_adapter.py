"""Presents our models as lm-eval's ``LM``, so that its hundreds of tasks run on either engine.

    import lm_eval
    from twostroke.evaluation.lm_eval_adapter import language_model

    lm_eval.simple_evaluate(language_model("runs/mine", engine="inference"), tasks=["arc_easy"])

lm-eval is in the extra ``eval``, and only ``language_model`` needs it. tests/evaluation/test_lm_eval_adapter.py compares the
scores of a task by lm-eval through this adapter, by ours, and by lm-eval's own transformers model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twostroke.core.errors import ConfigError, InputError
from twostroke.core.paths import model_directory
from twostroke.evaluation.encoding import Encoder
from twostroke.evaluation.engines import open_scorer
from twostroke.evaluation.scorer import Scorer

MAX_NEW_TOKENS = 256
"""The default for tasks that name no number; lm-eval's own models have the same."""

_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class Request(Protocol):
    """lm-eval's ``Instance``. Its arguments are a context with a continuation, a text, or a context with generation options."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class Adapter:
    """lm-eval's three kinds of request. This class does not import lm-eval, so that it can be tested without it."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.encoder = Encoder(scorer)

    def loglikelihood(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Σ log p of each continuation, and whether greedy decoding would write it. Contexts that are too long are cut at their
        beginning."""
        pairs = [self.encoder.pair(*request.args) for request in requests]
        scored = self.scorer.token_scores([(p.ids, p.first) for p in pairs])
        return [(-float(nats.sum(dtype=np.float64)), bool(greedy.all())) for nats, greedy in scored]

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """Σ log p of whole texts, each token once. Windows of the longest sequence follow each other, and the last one is moved
        to the left so that it is full. The first token is conditioned on the token that begins a text."""
        sequences: list[tuple[list[int], int]] = []
        owners: list[int] = []
        longest = self.scorer.longest
        for owner, request in enumerate(requests):
            ids = [*self._start(), *self.encoder.tokenizer.encode(request.args[0], add_special_tokens=False).ids]
            for first in range(1, len(ids), longest):
                stop = min(first + longest, len(ids))
                begin = max(0, stop - longest - 1)
                sequences.append((ids[begin:stop], first - begin))
                owners.append(owner)
        totals = np.zeros(len(requests))
        for owner, (nats, _) in zip(owners, self.scorer.token_scores(sequences), strict=True):
            totals[owner] -= float(nats.sum(dtype=np.float64))
        return [float(total) for total in totals]

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to one of ``until``. Raises InputError for sampling and for unknown options, because ignoring
        them would give a wrong score."""
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_generation(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for (stop, max_tokens), members in groups.items():
            prompts = [self.encoder.prompt(requests[i].args[0], max_tokens)[0] for i in members]
            for i, text in zip(members, self.scorer.continue_greedily(prompts, max_tokens, stop), strict=True):
                texts[i] = text
        return texts

    def _start(self) -> list[int]:
        start = self.encoder.start
        return [] if start is None else [start]


def _generation(options: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """(stop strings, largest number of tokens) of ``gen_kwargs``."""
    left = dict(options)
    until = left.pop("until", None) or ()
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    limits = [left.pop(name) for name in _TOKEN_LIMITS if left.get(name) is not None]
    sampled = left.pop("do_sample", False) and left.get("temperature", 1.0) != 0
    if sampled or left.get("temperature") not in (None, 0, 0.0):
        raise InputError(f"the task samples ({dict(options)!r:.120}), and tasks are answered by greedy decoding alone.")
    for name in _SAMPLING:  # they do not affect greedy decoding
        left.pop(name, None)
    unknown = [name for name, value in left.items() if value is not None]
    if unknown:
        raise InputError(f"the task's generation option {unknown[0]}={left[unknown[0]]!r} is not supported. Leave it out.")
    return stop, int(limits[0]) if limits else MAX_NEW_TOKENS


def language_model(model: Path | str, engine: str = "auto", dtype: str | None = None) -> Any:
    """An lm-eval ``LM`` of a model directory or a training run. ``engine`` and ``dtype`` are those of ``twostroke eval``.

    Raises ConfigError if lm-eval is not installed, and the errors of loading."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ConfigError("lm-eval is not installed. Run `pip install 'twostroke[eval]'`.") from None

    directory = model_directory(model)

    class LanguageModel(Adapter, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            Adapter.__init__(self, open_scorer(directory, engine, dtype))

        @property
        def tokenizer_name(self) -> str:
            return str(directory)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            from twostroke.data.chat import read_chat_template, render_chat

            template, variables = read_chat_template(directory)
            return render_chat(template, chat_history, add_generation_prompt, **variables)

    return LanguageModel()
