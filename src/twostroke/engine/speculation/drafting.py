"""``Drafting``: a step's drafts, from any of the drafters, each cut where a request's grammar would not accept it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.engine.grammars import Grammars, Matcher
from twostroke.engine.speculation.draft_model import ModelDrafter
from twostroke.engine.speculation.drafter import Drafter
from twostroke.engine.speculation.early_exit import ExitDrafter, RepeatsOrExits
from twostroke.engine.speculation.forced import ForcedDrafts
from twostroke.scheduling.request import Request
from twostroke.scheduling.scheduler import Scheduler

AnyDrafter = Drafter | ModelDrafter | ExitDrafter | RepeatsOrExits


class Drafting:
    """``drafter`` and ``forced`` are None if steps check no drafts."""

    def __init__(self, scheduler: Scheduler, grammars: Grammars) -> None:
        self.drafter: AnyDrafter | None = None
        self.forced: ForcedDrafts | None = None
        self._scheduler, self._grammars = scheduler, grammars

    def propose(self, decoding: Sequence[Request], n_rows: int, room: int) -> Mapping[int, Sequence[int]]:
        """Drafts for those of ``decoding`` that do not search: what follows in a search is chosen from all its sequences. Where
        an answer must have a form, a draft ends before the first token that does not continue it, and where one text alone may
        follow, that is a draft. See ``scheduling.step.Propose``."""
        assert self.drafter is not None
        assert self.forced is not None
        found: Mapping[int, Sequence[int]]
        if not self._scheduler.searching:
            found = self.drafter.propose(decoding, n_rows, room)
        else:
            places = [i for i, request in enumerate(decoding) if request.beams is None]
            of_places = self.drafter.propose([decoding[i] for i in places], n_rows, room) if places else {}
            found = {places[i]: draft for i, draft in of_places.items()}
        if not self._grammars.used:
            return found
        cut: dict[int, Sequence[int]] = {}
        for i, draft in found.items():
            matcher = decoding[i].matcher
            kept = draft[: matcher.accepted(decoding[i].tokens, draft)] if isinstance(matcher, Matcher) else draft
            if kept:
                cut[i] = kept
        n = sum(map(len, cut.values()))
        return cut | self.forced.propose(decoding, cut, n_rows + n, room - n)
