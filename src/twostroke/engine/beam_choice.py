"""Chooses how beam searches go on after a step, from the logits of their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twostroke.core.errors import DataError, InputError
from twostroke.core.spec import ModelSpec
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine import native_sampling
from twostroke.engine.adjust import Adjusted, is_changed
from twostroke.engine.detokenize import IncrementalDetokenizer
from twostroke.engine.sampler import logprobs_of, plain_top
from twostroke.kernels.native_library import library
from twostroke.scheduling.beams import Beam, Beams, BeamSearch
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Known = tuple[Float[Tensor, " n"], Int[Tensor, " n"]]


Chosen = tuple[Request, BeamSearch | None]
"""The root of a search, and how it goes on; None if a row is not finite."""


class BeamChooser:
    """Of the model in ``directory``. Its tokenizer is read when a search first asks for stop strings."""

    def __init__(self, spec: ModelSpec, directory: Path) -> None:
        self._spec = spec
        self._directory = directory
        self._tokenizer: Any = None
        self._lengths: dict[bool, dict[int, int]] = {}

    def check(self, params: SamplingParams) -> None:
        """Raises InputError or DataError if the model cannot search so."""
        if params.beam_width > self._spec.vocab_size:
            raise InputError(
                f"{params.beam_width} beams are more than the vocabulary's {self._spec.vocab_size} tokens. Use fewer.",
                field="n",
            )
        if params.stop and self._tokenizer is None:
            if not (self._directory / "tokenizer.json").is_file():
                raise DataError(
                    f"{self._directory} has no tokenizer.json, so stop strings cannot be found. Use stop_token_ids."
                )
            self._tokenizer = load_tokenizer(self._directory)

    def choose(
        self,
        searching: Sequence[Beams],
        step: ScheduledStep,
        places: Sequence[int],
        logits: Float[Tensor, "n V"],
        known: Known | None,
        n_threads: int,
    ) -> list[Chosen]:
        """For each search whose sequences sample in ``step``: its root, and how it goes on. None if a row is not finite. The
        search itself is left as it was. ``logits`` are those of the requests at ``places``, with a row more for each draft.
        """
        row_of: dict[Request, int] = {}
        n_rows = 0
        for place in places:
            row_of[step.requests[place]] = n_rows
            n_rows += 1 + len(step.drafts.get(place, ()))
        found: list[Chosen] = []
        for beams in searching:
            if beams.live[0] in row_of and not beams.folded:  # then all of them are
                rows = [row_of[request] for request in beams.live]
                largest = logits[rows].amax(dim=1) if known is None else known[0][rows]
                finite = all(map(math.isfinite, largest.tolist()))
                found.append((beams.root, self._advanced(beams, logits, rows, n_threads) if finite else None))
        return found

    def _advanced(self, beams: Beams, logits: Float[Tensor, "n V"], rows: Sequence[int], n_threads: int) -> BeamSearch:
        root, params = beams.root, beams.root.params
        # So many of a row may end or be among the best, that those which go on are among them.
        n_each = beams.width * (2 if params.stop else 1) + len(root.stop_ids)
        candidates = best_continuations(logits, rows, beams.live, min(n_each, logits.shape[1]), n_threads)
        search = beams.search.advance(candidates, self._stops(root))
        if params.logprobs is not None:
            new = [beam for beam in (*search.live, *(b for _, b in search.ended)) if beam.logprobs is None]
            at, tokens = [rows[beam.place] for beam in new], [beam.token for beam in new]
            entries = logprobs_of(logits, at, tokens, [params.logprobs] * len(new), n_threads) if new else []
            for beam, entry in zip(new, entries, strict=True):
                beam.logprobs = entry
        return search

    def _stops(self, root: Request) -> Callable[[Beam], bool]:
        params, stop_ids = root.params, root.stop_ids
        if not params.stop:
            return lambda beam: beam.token in stop_ids and beam.length > params.min_tokens
        prompt, eos = root.tokens[: root.n_prompt], self._spec.eos_token_ids

        def stops(beam: Beam) -> bool:
            assert beam.before is not None
            text = beam.before.text
            if text is None:
                text = IncrementalDetokenizer.of(self._tokenizer, params, eos, prompt, self._lengths)
            beam.text = text.fork()
            beam.text.add((beam.token,))
            return beam.text.stopped or (beam.token in stop_ids and beam.length > params.min_tokens)

        return stops


def best_continuations(
    logits: Float[Tensor, "n V"], rows: Sequence[int], requests: Sequence[Request], n: int, n_threads: int = 1
) -> list[list[tuple[int, float]]]:
    """The ``n`` best (token, log-probability) pairs of each of ``rows``, best first.

    Biases and penalties change log-probabilities here, which are not normalised again: as in transformers."""
    if any(map(is_changed, requests)):
        scores = torch.log_softmax(logits[list(rows)], dim=1)
        Adjusted(scores, range(len(rows)), requests, n_threads)
        best, tokens = scores.topk(n, dim=1)
        return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), best.tolist(), strict=True)]
    if library() is None:
        normalisers, values, ids = plain_top(logits, rows, n)
    else:
        normalisers, values, ids = native_sampling.top(logits, rows, n, n_threads)
    best_of_rows = (values - normalisers[:, None]).tolist()
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), best_of_rows, strict=True)]
