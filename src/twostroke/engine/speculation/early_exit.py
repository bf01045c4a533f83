"""Drafts of the served model's own first layers: the final norm and the head read what they made (self-speculation).

The idea is LayerSkip's (Elhoushi et al. 2024, arXiv:2404.16710, section 4.3). A draft's keys and values of these layers go into
the request's own pages, and the step that checks it writes the same bits there again, because the native library computes a row
alike in any step. So there is no second cache and no second copy of a weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from twostroke.core.engine_settings import EXIT, EXIT_AFTER
from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.engine.sampler import sample
from twostroke.engine.speculation.ahead import DraftsAhead
from twostroke.engine.speculation.drafter import Drafter
from twostroke.engine.speculation.lengths import StepTimes
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep

EXIT_SHARE = 0.25
"""Share of the layers that drafts if no number is given. Assumed: LayerSkip's 13B of 40 layers gained 1.75 times with an exit
after 8 and nothing with one after 4, when it was run again in transformers (Hugging Face's blog, commit 04bd551)."""

UNTRAINED = (
    "drafts by early exit: the head of this model was not trained to read earlier layers (train.exit_loss), so few drafts will "
    "be right. Answers are the same."
)


def exit_layers(spec: ModelSpec, speculate: str) -> int | None:
    """After how many layers drafts are read under ``speculate``; None if they are not. "auto" asks for it where the model was
    trained for it. Raises ConfigError for a number that the model does not have."""
    given = speculate.startswith(EXIT_AFTER)
    if not (given or speculate == EXIT or (speculate == "auto" and spec.early_exit)):
        return None
    layers = int(speculate.removeprefix(EXIT_AFTER)) if given else max(1, round(EXIT_SHARE * spec.n_layers))
    if layers < spec.n_layers:
        return layers
    if speculate == "auto":
        return None
    raise ConfigError(
        f"speculate={speculate!r} needs a layer before the last, and the model has {spec.n_layers}. "
        + (f"Use {EXIT_AFTER}1 to {EXIT_AFTER}{spec.n_layers - 1}." if spec.n_layers > 1 else "Use speculate='off'.")
    )


Compute = Callable[[ScheduledStep], tuple[Tensor, tuple[Tensor, Tensor]]]
"""Logits of a step's rows after the first layers, and each row's largest with its token."""


class ExitDrafter(DraftsAhead):
    """Drafts by ``compute``, a row of each request after another, drawn with the served request's parameters and the very
    random numbers that the whole model will use at each place.

    ``reserve`` takes pages for a request's drafts (``Scheduler.reserve``), ``seed_of`` gives its random stream."""

    def __init__(
        self,
        compute: Compute,
        times: StepTimes,
        draft_times: StepTimes,
        reserve: Callable[[Request, int], int],
        seed_of: Callable[[Request], int],
    ) -> None:
        super().__init__(times, draft_times)
        self._compute, self._reserve, self._seed_of = compute, reserve, seed_of
        self._made: dict[str, tuple[int, list[int]]] = {}  # by request: how many tokens it had, and the drafts behind them
        self._n_steps = 0

    def ended(self, request: Request) -> None:
        self._made.pop(request.id, None)

    def _compare(self, served: Request) -> None:
        made = self._made.pop(served.id, None)
        if made is None:
            return
        first, drafts = made
        for place, (draft, token) in enumerate(zip(drafts, served.tokens[first:], strict=False)):
            self._shares.count(place, draft == token)
            if draft != token:
                break

    def _draft_tokens(self, decoding: Sequence[Request], n: int) -> dict[int, list[int]]:
        # The row behind the last draft yields one token more.
        wanted = [min(n, request.limit - len(request.tokens) - 1) for request in decoding]
        most = [self._reserve(request, m) if m > 0 else 0 for request, m in zip(decoding, wanted, strict=True)]
        before = [len(request.tokens) for request in decoding]
        left = list(range(len(decoding)))
        try:
            for ahead in range(n):
                left = [i for i in left if ahead < most[i]]
                if not left:
                    break
                left = self._step([(i, decoding[i]) for i in left], ahead)
            found = {i: request.tokens[before[i] :] for i, request in enumerate(decoding)}
        finally:
            for request, n_tokens in zip(decoding, before, strict=True):
                del request.tokens[n_tokens:]
        found = {i: drafts for i, drafts in found.items() if drafts}
        for i, drafts in found.items():
            self._made[decoding[i].id] = before[i], drafts
        return found

    def _step(self, drafting: Sequence[tuple[int, Request]], ahead: int) -> list[int]:
        """Append the draft that is ``ahead`` of the next token to each request. Returns the places of those that go on: not
        behind a token that ends them, nor behind logits that are not finite."""
        began = time.perf_counter()
        self._n_steps += 1
        requests = [request for _, request in drafting]
        n = len(requests)
        starts = [request.n_computed + ahead for request in requests]
        grown = requests if ahead == 0 else []  # the runner keeps its own table of pages
        logits, known = self._compute(ScheduledStep(self._n_steps, requests, [1] * n, starts, n, grown, []))
        drawn = sample(logits, requests, [self._seed_of(request) for request in requests], known)
        failed = set(drawn.failed)
        going_on = []
        for j, ((place, request), token) in enumerate(zip(drafting, drawn.tokens, strict=True)):
            if j not in failed and token not in request.stop_ids:
                request.tokens.append(token)  # only for the rows behind it: ``_draft_tokens`` takes it back
                going_on.append(place)
        self.draft_times.saw(n, time.perf_counter() - began)
        return going_on


class RepeatsOrExits:
    """Drafts of ``repeats``, which cost nothing to make, and in steps without any those of ``exits``. Both know the same
    step times."""

    def __init__(self, repeats: Drafter, exits: ExitDrafter) -> None:
        self.repeats, self.exits = repeats, exits

    def propose(self, decoding: Sequence[Request], n_rows: int, room: int) -> Mapping[int, Sequence[int]]:
        """See ``scheduling.step.Propose``."""
        return self.repeats.propose(decoding, n_rows, room) or self.exits.propose(decoding, n_rows, room)

    def saw(self, step: ScheduledStep, seconds: float) -> None:
        """``step`` took ``seconds``, with drafting."""
        self.exits.saw(step, seconds)

    def ended(self, request: Request) -> None:
        """A request has ended."""
        self.repeats.ended(request)
        self.exits.ended(request)
