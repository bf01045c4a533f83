"""Defines every latency and rate. Reports print these formulas beside the names.

Times are seconds on one monotonic clock. ``scheduled`` is when the arrival process wants a request to start. Latencies count
from it and not from when the client could send, so that a server that holds the client up cannot hide the wait ("coordinated
omission"). A chunk is one server-sent event with text. The first event of a chat stream names only the role and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twostroke.core.distribution import Distribution
from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.core.units import format_seconds

FORMULAS: dict[str, str] = {
    "ttft_s": "time to first token = first non-empty chunk − scheduled",
    "tpot_s": "time per output token = (E2E − TTFT) / (output tokens − 1), per request; none where output tokens ≤ 1",
    "itl_s": "inter-token latency = gaps between consecutive non-empty chunks, pooled over all requests",
    "e2e_s": "end to end = last non-empty chunk − scheduled",
    "duration_s": "last chunk of any request − first scheduled",
    "requests_per_s": "completed requests / duration",
    "output_tok_per_s": "output tokens of completed requests / duration",
    "total_tok_per_s": "(prompt + output tokens of completed requests) / duration",
    "goodput_per_s": "completed requests that meet every term of the SLO / duration",
    "peak_concurrency": "most requests between being sent and their end at one moment",
    "ttft_from_sent_s": "first non-empty chunk − sent: without what the client held back",
    "e2e_from_sent_s": "last non-empty chunk − sent",
    "send_delay_s": "sent − scheduled: waiting for the concurrency cap, and the start delay",
    "start_delay_s": "sent − when it was due and had a place: the load generator's own lateness",
}


@dataclass(frozen=True)
class RequestRecord:
    """Raw times of one request, in seconds since the load began. ``error`` is a short reason; None if the request completed."""

    DOCUMENT = "index scheduled_s ready_s sent_s chunk_times_s ended_s prompt_tokens output_tokens finish_reason error"

    index: int
    scheduled_s: float
    sent_s: float
    chunk_times_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    finish_reason: str | None = None
    ready_s: float | None = None  # when it was due and had a place; None: when it was scheduled

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times_s[0] - self.scheduled_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.chunk_times_s[-1] - self.scheduled_s if self.chunk_times_s else None

    @property
    def ttft_from_sent_s(self) -> float | None:
        return self.chunk_times_s[0] - self.sent_s if self.chunk_times_s else None

    @property
    def e2e_from_sent_s(self) -> float | None:
        return self.chunk_times_s[-1] - self.sent_s if self.chunk_times_s else None

    @property
    def start_delay_s(self) -> float:
        return self.sent_s - (self.scheduled_s if self.ready_s is None else self.ready_s)

    @property
    def tpot_s(self) -> float | None:
        if self.output_tokens <= 1 or self.ttft_s is None or self.e2e_s is None:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]


@dataclass(frozen=True)
class Slo:
    """A service-level objective: upper bounds in seconds, or None for no bound. An undefined TPOT meets any bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """``ttft=0.5,tpot=0.05,e2e=10``, in seconds. Raises ConfigError."""
        terms: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, separator, value = part.partition("=")
            name = name.strip()
            if name not in ("ttft", "tpot", "e2e"):
                raise ConfigError(f"--slo term {name!r} is not known. {did_you_mean(name, ('ttft', 'tpot', 'e2e'))}")
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if not separator or not 0 < seconds < math.inf:
                raise ConfigError(f"--slo {part!r} must look like {name}=0.5, in seconds, above 0.")
            terms[f"{name}_s"] = seconds
        if not terms:
            raise ConfigError("--slo is empty. Give terms such as ttft=0.5,tpot=0.05,e2e=10.")
        return cls(**terms)

    def met_by(self, record: RequestRecord) -> bool:
        if not record.ok:
            return False
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            bound, value = getattr(self, name), getattr(record, name)
            if bound is not None and value is not None and value > bound:
                return False
        return True


MOST_LATE_SHARE = 0.01
"""Share of TTFT that the load generator's own lateness may reach before a run is refused."""


@dataclass(frozen=True)
class LoadSummary:
    """All numbers of one load, named and defined as in ``FORMULAS``."""

    DOCUMENT = (
        "n_requests n_completed failures duration_s prompt_tokens output_tokens requests_per_s output_tok_per_s "
        "total_tok_per_s peak_concurrency goodput_per_s slo_met engine ttft_s tpot_s itl_s "
        "e2e_s ttft_from_sent_s e2e_from_sent_s send_delay_s start_delay_s"
    )

    n_requests: int
    n_completed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    ttft_from_sent_s: Distribution
    e2e_from_sent_s: Distribution
    send_delay_s: Distribution
    start_delay_s: Distribution
    requests_per_s: float
    output_tok_per_s: float
    total_tok_per_s: float
    peak_concurrency: int
    goodput_per_s: float | None = None
    slo_met: int | None = None
    engine: dict[str, float] = field(default_factory=dict)  # counters of the server's engine; empty for other servers

    @property
    def lateness(self) -> str | None:
        """A sentence where the load generator was late: its p99 start delay passes ``MOST_LATE_SHARE`` of the median TTFT."""
        late, first = self.start_delay_s.p99, self.ttft_s.median
        if not late > MOST_LATE_SHARE * first:  # NaN without an answer
            return None
        return (
            f"the load generator was late: its p99 start delay of {format_seconds(late)} passes "
            f"{100 * MOST_LATE_SHARE:g}% of the median TTFT of {format_seconds(first)}, so latencies are not the server's "
            "alone. Use a lower rate, fewer users or longer prompts, or another machine to send from."
        )


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests open at one moment. A request that ends when another is sent does not overlap it."""
    changes = sorted((time, step) for r in records for time, step in ((r.sent_s, 1), (r.ended_s, -1)))
    most = now = 0
    for _, step in changes:
        now += step
        most = max(most, now)
    return most


def count_failures(records: Iterable[RequestRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts


def summarise(
    records: Sequence[RequestRecord], slo: Slo | None = None, engine: Mapping[str, float] | None = None
) -> LoadSummary:
    """The numbers of a load. Latencies are those of completed requests; a failed request counts only as a failure and for
    concurrency.

    ``duration_s`` is the time from the first scheduled time to the last chunk of any request, or to its end if it had no chunk.
    """
    done = [r for r in records if r.ok]
    if records:
        last = max(r.chunk_times_s[-1] if r.chunk_times_s else r.ended_s for r in records)
        duration = last - min(r.scheduled_s for r in records)
    else:
        duration = 0.0
    per_s = 1 / duration if duration > 0 else 0.0
    prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    met = None if slo is None else sum(slo.met_by(r) for r in done)
    return LoadSummary(
        n_requests=len(records),
        n_completed=len(done),
        failures=count_failures(records),
        duration_s=duration,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_s=Distribution.of([t for r in done if (t := r.ttft_s) is not None]),
        tpot_s=Distribution.of([t for r in done if (t := r.tpot_s) is not None]),
        itl_s=Distribution.of([gap for r in done for gap in r.itl_s]),
        e2e_s=Distribution.of([t for r in done if (t := r.e2e_s) is not None]),
        ttft_from_sent_s=Distribution.of([t for r in done if (t := r.ttft_from_sent_s) is not None]),
        e2e_from_sent_s=Distribution.of([t for r in done if (t := r.e2e_from_sent_s) is not None]),
        start_delay_s=Distribution.of([r.start_delay_s for r in records]),
        send_delay_s=Distribution.of([r.sent_s - r.scheduled_s for r in records]),
        requests_per_s=len(done) * per_s,
        output_tok_per_s=output * per_s,
        total_tok_per_s=(prompt + output) * per_s,
        peak_concurrency=peak_concurrency(records),
        goodput_per_s=None if met is None else met * per_s,
        slo_met=met,
        engine=dict(engine or {}),
    )
