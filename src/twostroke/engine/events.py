"""What a step gives the caller: the new tokens of each answer, under the names that requests came with."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.engine.sampler import TokenLogprobs
from twostroke.scheduling.request import FinishReason, Request
from twostroke.scheduling.sampling_params import SamplingParams


@dataclass(slots=True)  # frozen would cost a microsecond a token
class TokenEvent:
    """New tokens of answer ``index`` to one request. The answer's last event has a ``finish_reason``. With "error" (its logits
    were not finite) and "timeout" that event has no token. With "stop" the token that ended the answer is in ``token_ids``.

    ``prompt_logprobs``, if asked for, come before the first token of any answer, in events of answer 0 without tokens. Each
    event has those of the next tokens of the prompt, from the second token on.

    The answers of a beam search come at its end, the best first. An answer's last event has their ``cumulative_logprob``.
    ``cached_tokens``: how many tokens of the prompt were found in the cache, and ``started_s`` when it began to be computed
    (``time.monotonic``), in the first event of answer 0 that has tokens.
    A request with ``pooling`` has one event, with its ``embedding`` and no token. ``fingerprint``: of the weights that computed
    the tokens, in the answer's first event and where they change, once weights have been replaced; else None.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    index: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    cached_tokens: int = 0
    embedding: npt.NDArray[np.float32] | None = None
    fingerprint: str | None = None
    started_s: float | None = None


EVENT_ENTRIES = 512
"""Tokens and alternatives of a whole answer that make an event: answers that are sent on are sent in pieces."""


@dataclass
class Answer:
    """``weights``: those of its last event that had a fingerprint."""

    request_id: str
    index: int
    seed: int
    weights: bytes | None = None


class Answers:
    """The unfinished answers. To the scheduler each is a request with a name of its own.

    Events name the weights that computed them by ``fingerprints``, a dictionary by the weights' keys. It is empty until weights
    have been replaced."""

    def __init__(self) -> None:
        self.of_name: dict[str, Answer] = {}
        self.names_of: dict[str, list[str]] = {}  # of a request's unfinished answers
        self.fingerprints: dict[bytes, str] = {}

    def open(self, name: str, request_id: str, index: int, params: SamplingParams) -> None:
        """The scheduler's request ``name`` is answer ``index`` to ``request_id``."""
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.of_name[name] = Answer(request_id, index, seed)
        self.names_of.setdefault(request_id, []).append(name)

    def forget(self, name: str) -> None:
        request_id = self.of_name.pop(name).request_id
        self.names_of[request_id].remove(name)
        if not self.names_of[request_id]:
            del self.names_of[request_id]

    def seed_of(self, request: Request) -> int:
        """The seed of the request's random stream."""
        return self.of_name[request.id].seed

    def event(
        self,
        name: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        scores: list[TokenLogprobs] | None = None,
        weights: bytes | None = None,
    ) -> TokenEvent:
        answer = self.of_name[name]
        event = TokenEvent(answer.request_id, token_ids, logprobs, finish_reason, answer.index, scores)
        if self.fingerprints and weights is not None:
            self._tell_weights(event, answer, weights)
        return event

    def of_search(self, root: Request, why: FinishReason | None) -> list[TokenEvent]:
        """The answers of a search that has ended, by itself or because of ``why``."""
        assert root.beams is not None
        request_id, params, events = self.of_name[root.id].request_id, root.params, list[TokenEvent]()
        answers = [] if why == "error" else root.beams.search.answers()
        n_each = max(1, EVENT_ENTRIES // (1 + (params.logprobs or 0)))
        for i in range(params.n):
            beam = answers[i][1] if i < len(answers) else None
            path = [] if beam is None else beam.path()
            for first in range(0, max(1, len(path)), n_each):
                part = path[first : first + n_each]
                scored = None if params.logprobs is None else [each.logprobs for each in part]
                events.append(TokenEvent(request_id, [each.token for each in part], scored, index=i))
            events[-1].finish_reason = "stop" if beam is not None and beam.stopped else why or "length"
            events[-1].cumulative_logprob = None if beam is None else beam.score
        events[0].cached_tokens, events[0].started_s = root.n_prefix_hit, root.started_s
        if self.fingerprints:
            self._tell_weights(events[0], self.of_name[root.id], root.weights)
        return events

    def _tell_weights(self, event: TokenEvent, answer: Answer, weights: bytes) -> None:
        if answer.weights != weights:
            answer.weights, event.fingerprint = weights, self.fingerprints.get(weights)
