"""How engines choose a step: which prompts, how much of them, and what memory they hold and take. One row an engine.

Ours is the scheduler that serves (``scheduling``). The others are the same scheduler with a rule or two changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.checks import check_amount, check_whole
from twostroke.core.errors import ConfigError, did_you_mean
from twostroke.core.policy import MAX_RUNNING, TOKEN_BUDGET
from twostroke.scheduling.request import Request
from twostroke.scheduling.steady import SteadyScheduler
from twostroke.scheduling.step import Propose, ScheduledStep


class InOrder(SteadyScheduler):
    """Requests are admitted in the order in which they came."""

    look_ahead = 0


class PromptsApart(InOrder):
    """While a prompt can be computed, a step holds prompts alone and decoding waits."""

    def schedule(self, propose: Propose | None = None) -> ScheduledStep:
        step = super().schedule()  # its drafts would be of requests that this step leaves out
        n = step.n_decodes
        if n == len(step.requests):
            return step
        step = ScheduledStep(
            step.number, step.requests[n:], step.counts[n:], step.starts[n:], 0, step.grown, step.preempted, step.copies
        )
        self._in_flight = step
        return step

    def _prompt_budget(self, n_decodes: int) -> int:
        return self.config.token_budget


class ReservingScheduler(InOrder):
    """A request is admitted when its longest answer fits, and is never preempted."""

    @staticmethod
    def _tokens_to_hold(request: Request) -> int:
        return request.limit - 1  # the last token is never fed back


class WholePrompts(ReservingScheduler):
    """A prompt that does not fit beside the step's other prompts waits for the next. Only one that no step holds is cut.

    Decoding requests take nothing from the budget: servers are set up with room for them beside the longest prompt, because a
    prompt of ``max_num_tokens`` would else wait until nothing decodes."""

    def _prompt_budget(self, n_decodes: int) -> int:
        return self.config.token_budget

    def _chunk(self, n_left: int, budget: int) -> int:
        if n_left <= budget:
            return n_left
        return budget if n_left > self.config.token_budget else 0


@dataclass(frozen=True)
class Taking:
    """When an engine's scheduler gets requests that have come. Nothing of it holds while nothing decodes.

    ``ahead``: a step is decided while the one before runs, so what comes during a step is in the next but one.
    ``every``: it looks for requests once in so many steps that only decode, and after each step with a prompt.
    ``hold_steps``: prompts wait so many steps at most, until ``hold_tokens`` (those of prompts and a token of each decoding
    request) or ``hold_prompts`` of them are together, and then fill one step at most."""

    ahead: bool = False
    every: int = 1
    hold_steps: int = 0
    hold_tokens: float = 0.0
    hold_prompts: int = 0

    def __post_init__(self) -> None:
        check_whole("every", self.every)
        for name in ("hold_steps", "hold_prompts"):
            check_whole(name, getattr(self, name), 0)
        check_amount("hold_tokens", self.hold_tokens)


AT_ONCE = Taking()


@dataclass(frozen=True)
class Policy:
    """An engine's defaults. ``token_budget``: most tokens of a step; ``max_running``: most requests that run at once;
    ``shares_free``: the share of memory that it takes is of what weights leave, not of all."""

    name: str
    scheduler: type[SteadyScheduler]
    token_budget: int
    max_running: int
    source: str
    taking: Taking = AT_ONCE
    shares_free: bool = False

    def room_bytes(self, share: float, memory_bytes: float, weights_bytes: float, process_bytes: float) -> float:
        """Bytes left for the KV cache where ``share`` of memory may be used. May be negative."""
        if self.shares_free:
            return share * (memory_bytes - weights_bytes - process_bytes)
        return share * memory_bytes - weights_bytes - process_bytes


POLICIES = {
    row.name: row
    for row in (
        Policy("twostroke", SteadyScheduler, TOKEN_BUDGET, MAX_RUNNING, "core.policy"),
        Policy(
            "vllm", InOrder, 8192, 1024,
            "docs.vllm.ai/en/v0.17.1/configuration/optimization: chunked prefill, decodes first; vllm/engine/arg_utils.py: "
            "8192 tokens and 1024 sequences for a server on a device of 70 GiB and more; async scheduling on",
            Taking(ahead=True),
        ),
        Policy(
            "sglang", PromptsApart, 8192, 2048,
            "docs.sglang.ai/backend/server_arguments: chunked_prefill_size 8192, enable_mixed_chunk off; "
            "sglang/srt/managers/scheduler.py, get_next_batch_to_run: a batch of prompts goes before the running batch; "
            "event_loop_overlap: the next batch is launched before the last one's results are read",
            Taking(ahead=True),
        ),
        Policy(
            "trtllm", WholePrompts, 8192, 2048,
            "nvidia.github.io/TensorRT-LLM/features/paged-attention-ifb-scheduler: max_num_tokens 8192, max_batch_size 2048, "
            "GUARANTEED_NO_EVICT, chunked context off; features/overlap-scheduler: on; "
            "llm-api/reference/KvCacheConfig: free_gpu_memory_fraction",
            Taking(ahead=True),
            shares_free=True,
        ),
        Policy(
            "llama.cpp", ReservingScheduler, 2048, 4,
            "llama.cpp/tools/server/README.md: --batch-size 2048, four slots, continuous batching; every slot has its context",
        ),
    )
}  # fmt: skip


def policy_of(engine: str) -> Policy:
    """The row of ``engine``; "any" stands for vLLM's, which mixes prompts and decoding as most engines do. Raises
    ConfigError."""
    name = "vllm" if engine == "any" else engine
    if name not in POLICIES:
        raise ConfigError(f"engine={engine!r} has no policy. {did_you_mean(engine, tuple(POLICIES))}")
    return POLICIES[name]
