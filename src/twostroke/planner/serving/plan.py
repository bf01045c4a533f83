"""What serving a model will take: memory by term, prefill and decode time by component, latency, throughput, energy, money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from twostroke.core import engines
from twostroke.core.described import As, LeftOut
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.matrices import block_kinds
from twostroke.core.named import letter, named, within
from twostroke.core.policy import logits_bytes
from twostroke.core.schemes import MIXED, NATIVE, PLANNED, TORCH_HELD, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes
from twostroke.planner.hardware.corrections import corrections_notes, learned_factor
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.present import present_notes
from twostroke.planner.money.cost import Cost, TokenPrices, cost_of, energy_kwh, token_prices, usd_per_million_tokens
from twostroke.planner.money.power import Busy, mean_watts
from twostroke.planner.serving.adapters import held_bytes
from twostroke.planner.serving.datasheet import Datasheet
from twostroke.planner.serving.llama_cpp import LlamaCpp
from twostroke.planner.serving.load import Latency, Steps, closed_loop
from twostroke.planner.serving.memory import kv_bytes_on_device, largest_batch, request_kv_bytes, request_pages
from twostroke.planner.serving.native import Native
from twostroke.planner.serving.shape import LLAMA_CPP, ServingShape
from twostroke.planner.serving.strategy import Strategy
from twostroke.planner.serving.torch_runner import TorchRunner
from twostroke.planner.work.component import Work, shown, total_seconds
from twostroke.planner.work.flops import decode_flops, prefill_flops
from twostroke.planner.work.params import Parameters, check_targets, count_parameters
from twostroke.planner.work.weights import kv_bytes_per_token, mixed_weights_bytes


class ServingMemory:
    """Bytes of one device."""

    weights: Annotated[float, "bytes"]
    kv_cache: Annotated[float, "bytes", "of whole pages"]
    activations: Annotated[float, "bytes", "of the longest prefill"]
    logits: Annotated[float, "bytes", "of a step of the batch, fp32"]
    adapters: Annotated[float, "bytes", "of adapters that are served beside the model", LeftOut]
    process: Annotated[float, "bytes", "resident at rest (CPU)"]
    peak: Annotated[float, "bytes", "of all terms"]


class ServingPrediction:
    """Predictions of serving, by their ledger names."""

    ttft_s: Annotated[float, "s", "to the first token of an idle server"]
    tpot_s: Annotated[float, "s", "between tokens"]
    e2e_s: Annotated[float, "s", "of a whole answer"]
    prefill_tok_per_s: Annotated[float, "tok/s", "of one prompt"]
    decode_tok_per_s: Annotated[float, "tok/s", "of all requests"]
    output_tok_per_s: Annotated[float, "tok/s", "of all requests, prefills included"]
    weights_bytes: Annotated[float, "bytes"]
    kv_cache_bytes: Annotated[float, "bytes", "that are set aside"]
    peak_memory_bytes: Annotated[float, "bytes"]
    model_bytes: Annotated[float, "bytes", "on disk"]
    startup_s: Annotated[float, "s", "before the first request, at a first start"]
    warm_startup_s: Annotated[float, "s", "the same, once an earlier start has packed the weights"]
    energy_per_mtok_kwh: Annotated[float, "kWh", "per million output tokens, at the devices"]
    cost_per_mtok_usd: Annotated[float, "$", "per million output tokens"]


class ServingPasses:
    """Passes by component."""

    prefill: Annotated[tuple[Work, ...], "one prompt"]
    decode: Annotated[tuple[Work, ...], "one step of the batch"]


ALONE = "one prompt alone, one component after another"
"""What a first token waits for."""


@dataclass(frozen=True)
class ServingPlan:
    """Everything predicted of serving. ``prefill`` is one prompt alone; ``decode`` one step of the whole batch, at the mean
    context of an answer."""

    DOCUMENT = (
        "model shape hardware parameters planned_only prediction memory_bytes kv_bytes_per_token kv_request_bytes loaded pages "
        "devices largest_batch passes prefill_flops_per_token decode_flops_per_token cost_per_hour token_prices notes"
    )

    spec: Annotated[ModelSpec, "what is served", As("model")]
    shape: Annotated[ServingShape, "how"]
    hardware: Annotated[Hardware, "on what"]
    parameters: Annotated[Parameters, "counts"]
    memory_bytes: dict[str, float]
    """By term. The native engine's cache takes memory as it is touched: what the batch's requests touch is counted, and a
    server that runs on fills it up to ``kv_cache_bytes``. Logits are those of the batch: ``prompt_logprobs`` take up to
    ``scheduling.step.scored_rows`` rows more."""

    kv_bytes_per_token: Annotated[float, "bytes", "of the cache a token"]
    pages: Annotated[int, "pages of the cache"]
    kv_cache_bytes: float  # what the engine sets aside for it on one device
    largest_batch: Annotated[int, "such requests that memory holds while they decode"]
    prefill: tuple[Work, ...]
    decode: tuple[Work, ...]
    prefill_flops_per_token: Annotated[float, "FLOP", "of a prompt token"]
    decode_flops_per_token: Annotated[float, "FLOP", "of an output token"]
    model_bytes: float
    startup_s: float
    warm_startup_s: float
    cost_per_hour: Annotated[Cost, "of all devices of one copy, kept busy"]
    prompt_busy: Busy  # a prompt alone
    step_busy: Busy  # a step of the batch
    added_by_a_prompt_s: float  # by how much others' decoding is held up when a prompt is computed
    token_budget: int  # tokens of prompts that a step computes at most
    check_s: float | None = None  # a step that checks drafted tokens
    notes: Annotated[tuple[str, ...], "what to bear in mind"] = ()

    @property
    def planned_only(
        self,
    ) -> Annotated[tuple[str, ...], "what of it `twostroke serve` and `generate` do not run; empty where they run all of it"]:
        """What of it ``twostroke serve`` and ``generate`` do not run, in words; empty where they run all of it."""
        shape, hardware = self.shape, self.hardware
        return engines.not_served(
            self.spec, weights=shape.scheme, cache=shape.cache_dtype, devices=self.devices,
            accelerator=hardware.label if hardware.kind == "gpu" else None,
            engine=None if shape.engine == "any" else shape.engine,
        )  # fmt: skip

    @property
    def passes(self) -> Annotated[dict[str, tuple[Work, ...]], ServingPasses, "time by component"]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def memory_and_peak(self) -> Annotated[dict[str, float], ServingMemory, "bytes by term", As("memory_bytes")]:
        return {**self.memory_bytes, "peak": self.peak_memory_bytes}

    @property
    def ttft_s(self) -> float:
        """First token of a request that arrives at an idle server: its prefill."""
        return named("ttft_s", total_seconds(self.prefill), "s", ALONE)

    @property
    def step_s(self) -> float:
        """One plain decode step of ``batch`` requests."""
        source = f"one step of {self.shape.batch} requests, one component after another"
        return named("step_s", total_seconds(self.decode), "s", source)

    @property
    def tpot_s(self) -> float:
        """Seconds between tokens of one request while ``batch`` requests decode and none arrives: one decode step; with
        speculation step ÷ speed-up."""
        if self.shape.speculation is None or self.check_s is None:
            return named("tpot_s", self.step_s, "s", "a token a step")
        between = self.step_s / self.shape.speculation.speed_up_of(self.step_s, self.check_s)
        return named(
            "tpot_s", between, "s", "Leviathan et al., arXiv 2211.17192: drafting, and a step that checks γ + 1 tokens"
        )

    @property
    def devices(self) -> Annotated[int, "devices of one copy"]:
        """Accelerators that hold one copy."""
        return self.shape.placement.devices

    @property
    def steps(self) -> Steps:
        """What ``load`` computes waiting from."""
        shape = self.shape
        fresh = shape.prompt_tokens - shape.hit_tokens
        return Steps(self.ttft_s, self.added_by_a_prompt_s, self.tpot_s, fresh, shape.output_tokens, self.token_budget)

    @property
    def loaded(self) -> Annotated[Latency, "latency beside other users"]:
        """Of ``batch`` users who each ask again when answered, all answers equally long, by formulas: ``load.closed_loop``.
        ``plan serve`` puts the simulation's medians in its place."""
        return closed_loop(self.steps, self.shape.prompts)

    @property
    def decode_tok_per_s(self) -> float:
        """batch / TPOT, all requests together."""
        return named("decode_tok_per_s", self.shape.batch / self.tpot_s, "tok/s", "all requests together")

    @property
    def prefill_tok_per_s(self) -> float:
        return named("prefill_tok_per_s", self.shape.prompt_tokens / self.ttft_s, "tok/s", "one prompt alone")

    @property
    def e2e_s(self) -> float:
        """TTFT + (output − 1)·TPOT."""
        seconds = self.ttft_s + (self.shape.output_tokens - 1) * self.tpot_s
        return named("e2e_s", seconds, "s", "the first token is the prefill's")

    @property
    def output_tok_per_s(self) -> float:
        """Output tokens/s of a full batch kept full: batch·output ÷ (a prefill a prompt, one after another, + output·TPOT)."""
        shape = self.shape
        rate = shape.batch * shape.output_tokens / (shape.prompts * self.ttft_s + shape.output_tokens * self.tpot_s)
        return named("output_tok_per_s", rate, "tok/s", "a batch kept full, prefills one after another")

    @property
    def usd_per_mtok(self) -> float:
        """$ per million output tokens of the machine's price, prefill included, never idle."""
        usd = usd_per_million_tokens(self.output_tok_per_s, self._usd_per_hour)
        return named("usd_per_mtok", usd, "usd", "per million output tokens, prefill included, never idle")

    @property
    def _usd_per_hour(self) -> float:
        return self.devices * self.hardware.usd_per_hour.named("usd_per_hour", "usd/h")

    @property
    def usd_by_phase(self) -> Annotated[TokenPrices, "rent of the time that each phase takes, never idle", As("token_prices")]:
        """$ per million input tokens (prefill) and output tokens (decode), each by the time it takes; never idle."""
        return token_prices(self.prefill_tok_per_s, self.decode_tok_per_s, self._usd_per_hour)

    @property
    def watts(self) -> float:
        """Mean W of one device with the batch kept full: its prompts, and its steps."""
        return self.cost_per_hour.watts.value

    @property
    def kwh_per_mtok(self) -> float:
        """kWh of the devices per million output tokens: their mean power for as long as those take."""
        kwh = self.devices * energy_kwh(1e6 / self.output_tok_per_s, self.watts)
        return named("kwh_per_mtok", kwh, "kWh", "per million output tokens, at the devices", section="money")

    @property
    def kv_request_bytes(self) -> Annotated[float, "bytes", "of one prompt's cache"]:
        """KV cache of one prompt: what would move if prefill and decode were on two machines."""
        moved = self.shape.prompt_tokens * self.kv_bytes_per_token
        return named("kv_prompt_bytes", moved, "bytes", "a prompt's: what would move between machines of prefill and decode")

    @property
    def peak_memory_bytes(self) -> float:
        return named("peak_memory_bytes", sum(self.memory_bytes.values()), "bytes", "all are held while serving")

    def prediction(self) -> Annotated[dict[str, float | dict[str, float]], ServingPrediction, "the results"]:
        """Ledger names → values."""
        kept = {"energy_per_mtok_kwh": "kwh_per_mtok", "cost_per_mtok_usd": "usd_per_mtok"}
        return {name: getattr(self, kept.get(name, name)) for name in ServingPrediction.__annotations__}

    @property
    def weights_bytes(self) -> float:
        return self.memory_bytes["weights"]


# -- which engine ---------------------------------------------------------------------------------------------------------


def strategy_of(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> Strategy:
    """The engine whose steps are planned. Our own computes on the CPU, on one device; where that was calibrated it is the
    native engine, or on a machine without it the torch runner, whose steps are known of dense models with equal layers."""
    if shape.engine == LLAMA_CPP and hardware.basis == "datasheet":
        return LlamaCpp(spec, shape, hardware)
    ours = hardware.is_calibrated_cpu and shape.placement.devices == 1 and shape.scheme in served_schemes(hardware)
    if not ours or spec.global_attention is not None or spec.indexer is not None:
        return Datasheet(spec, shape, hardware)
    if hardware.runs_natively:
        return Native(spec, shape, hardware)
    return TorchRunner(spec, shape, hardware) if spec.moe is None and spec.mla is None else Datasheet(spec, shape, hardware)


def served_schemes(hardware: Hardware) -> tuple[str, ...]:
    """How our own engine can hold weights on a calibrated machine."""
    return NATIVE if hardware.runs_natively else TORCH_HELD


def check_placement(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> None:
    """Raises ConfigError where heads, layers or experts do not divide, or where a calibrated machine is asked for more than its
    engine does."""
    tensor, pipeline, expert = shape.tensor, shape.pipeline, shape.expert
    if spec.n_heads % tensor or (spec.n_kv_heads % tensor and tensor % spec.n_kv_heads):
        fitting = [
            d for d in range(1, spec.n_heads + 1) if not spec.n_heads % d and not (spec.n_kv_heads % d and d % spec.n_kv_heads)
        ]
        raise ConfigError(
            f"tensor={tensor} must divide n_heads={spec.n_heads} and go with n_kv_heads={spec.n_kv_heads}. "
            f"Use one of {', '.join(map(str, fitting))}."
        )
    if pipeline > spec.n_layers:
        raise ConfigError(f"pipeline={pipeline} is more than the model's n_layers={spec.n_layers}. Use at most that many.")
    if expert > 1 and spec.moe is None:
        raise ConfigError(f"expert={expert} spreads experts, and this model has none. Use --tensor or --pipeline.")
    if spec.moe is not None and spec.moe.n_experts % expert:
        raise ConfigError(f"expert={expert} must divide n_experts={spec.moe.n_experts}.")
    if expert > tensor and expert % tensor:
        raise ConfigError(f"expert={expert} must be a multiple of tensor={tensor}, or at most as much.")
    for group in shape.adapters:
        check_targets(spec, group.targets)
    if shape.others:
        known = {f"{layer}.{p.name}" for matrices, layers in block_kinds(spec) for layer in layers for p in matrices}
        unknown = sorted({name for name, _ in shape.others} - known)
        if unknown and unknown[0] in shape.in_bf16:
            raise ConfigError(f"in_bf16={unknown[0]!r} must be a matrix of the model, as 0.down.")
        if unknown or (shape.in_int8 and scheme_of(shape.scheme).beside is None):
            raise ConfigError(
                f"in_int8={(unknown or shape.in_int8)[0]!r} must be a matrix of the model, as 0.down, and scheme="
                f"{shape.scheme!r} one that holds some matrices in 8 bits. Those do: {', '.join(MIXED)}."
            )
    ours = served_schemes(hardware)
    if hardware.is_calibrated_cpu and shape.scheme not in ours:
        raise ConfigError(
            f"scheme={shape.scheme!r} is not served by the engine on this machine. Use one of {', '.join(ours)}, or "
            "name an accelerator with --hardware."
        )
    if hardware.basis != "measured" and not scheme_of(shape.scheme).planned:
        raise ConfigError(
            f"scheme={shape.scheme!r} is our engine's own, on a calibrated CPU (--hardware this). "
            f"On {hardware.label} use one of {', '.join(PLANNED)}."
        )


# -- the plan -------------------------------------------------------------------------------------------------------------


def plan_serving(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> ServingPlan:
    """Predict serving ``spec`` on one ``hardware``.

    Raises ConfigError where prompt and output exceed the context or the placement does not divide the model, CapacityError
    where weights and one request do not fit.
    """
    check_placement(spec, shape, hardware)
    limit = shape.max_model_len or spec.max_positions
    if limit > spec.max_positions:
        raise ConfigError(f"max_model_len={limit} is more than the model's max_positions={spec.max_positions}.")
    if shape.prompt_tokens + shape.output_tokens > limit:
        raise ConfigError(
            f"prompt_tokens={shape.prompt_tokens} and output_tokens={shape.output_tokens} make "
            f"{shape.prompt_tokens + shape.output_tokens} tokens; the context holds {limit}. Use less of either."
        )
    engine = strategy_of(spec, shape, hardware)
    weights, room = engine.weights_bytes(), engine.room_for_kv()
    one = kv_bytes_on_device(engine.cached, shape, request_kv_bytes(engine.cached, shape))
    if room < one:
        each = f" on each of {shape.placement.devices} devices" if shape.placement.devices > 1 else ""
        raise CapacityError(
            f"DOES NOT FIT: {shape.scheme} weights take {format_bytes(weights)} and one request's KV cache "
            f"{format_bytes(one)}{each}, and {hardware.label} has {format_bytes(hardware.memory_bytes)}, of which "
            f"{format_bytes(room + weights)} may be used. "
            "Use a smaller type, a shorter context, more memory or more devices."
        )
    page, pages = engine.page_bytes(), engine.cache_pages()
    notes = list(spec.notes)
    fitting, most = largest_batch(spec, shape, pages), largest_batch(spec, shape, room / page)
    if shape.kv_cache_bytes and not fitting:
        raise ConfigError(
            f"kv_cache_bytes={shape.kv_cache_bytes} holds {pages} pages of {page:.0f} bytes, and one request needs "
            f"{request_pages(spec, shape)}. Use at least {one:.0f}, or shorter prompts and answers."
        )
    if shape.kv_cache_bytes and weights + pages * page > hardware.memory_bytes:
        raise CapacityError(
            f"kv_cache_bytes={shape.kv_cache_bytes} and {weights / 1e9:.1f} GB of weights are more than the "
            f"{hardware.memory_bytes / 1e9:.1f} GB of {hardware.label}. Use less."
        )
    if fitting < shape.batch:
        notes.append(f"the KV cache holds {fitting} such requests at once, fewer than batch={shape.batch}: the others wait.")
    if engine.note:
        notes.append(engine.note)
    if shape.adapters and not isinstance(engine, Native):
        notes.append("adapters are counted in the memory; what they add to a step is planned of the native engine alone.")
    notes += (*present_notes(hardware), *corrections_notes(hardware))
    with within("prefill"):
        prefill = shown(engine.prefill(), "one prompt alone")
    with within("decode"):
        decode = shown(engine.decode(), f"one step of {shape.batch} requests")
    first = named("ttft_s", total_seconds(prefill), "s", ALONE)
    added = engine.added_s(first, total_seconds(decode))
    with within("check"):
        checking = engine.check_s()
    if checking is not None:
        checking = named("check_s", checking, "s", "a step that checks γ drafted tokens of each request and draws one more")
    with within("power"):
        prompt, step = engine.prompt_busy(), engine.step(shape.batch).busy
        watts = mean_watts((prompt.times(shape.prompts), step.times(shape.output_tokens)), hardware)
    parameters = count_parameters(spec)
    set_aside = named("kv_cache_bytes", pages * page, "bytes", "whole pages of the cache the engine takes, one device")
    touched, working = engine.touched_cache_bytes(set_aside), engine.working_bytes()
    process = named(
        "process_bytes", engine.process_bytes(), "bytes", "the process at rest, with torch and what the engine imports"
    )
    logits = logits_bytes(spec.vocab_size, shape.sampled_rows)
    drawn = "a step's logits in fp32: a row for each token that is drawn or checked"
    importing = letter("importing", hardware.process.import_s("serve"))
    starting = learned_factor(hardware, "serve_startup")
    first_start_s, warm_start_s = (starting * (importing + load_s) for load_s in (engine.first_load_s(), engine.load_s()))
    once, later = prefill_flops(spec, shape.prompt_tokens) / shape.prompt_tokens, decode_flops(spec, shape.context)
    return ServingPlan(
        spec=spec,
        shape=shape,
        hardware=hardware,
        parameters=parameters,
        memory_bytes={
            "weights": weights,
            "kv_cache": touched,
            "activations": working,
            "logits": named("logits_bytes", logits, "bytes", drawn),
            **({"adapters": held_bytes(spec, shape)} if shape.adapters else {}),
            "process": process,
        },
        kv_bytes_per_token=kv_bytes_per_token(engine.cached, shape.cache_dtype),
        pages=pages,
        kv_cache_bytes=set_aside,
        largest_batch=named("largest_batch", most, "requests", "whole ones that the memory holds", section="memory"),
        prefill=prefill,
        decode=decode,
        prefill_flops_per_token=named("prefill_flops_per_token", once, "FLOP", "the head for the last token only"),
        decode_flops_per_token=named("decode_flops_per_token", later, "FLOP", "one new token at the mean context"),
        model_bytes=mixed_weights_bytes(spec, engine.stored_scheme, shape.others),
        startup_s=named("startup_s", first_start_s, "s", "importing torch and the engine, reading and packing the weights"),
        warm_startup_s=named("warm_startup_s", warm_start_s, "s", "importing torch and the engine, reading the weights"),
        cost_per_hour=cost_of(3600.0, hardware, shape.placement.devices, watts=watts),
        prompt_busy=prompt,
        step_busy=step,
        added_by_a_prompt_s=added,
        token_budget=engine.token_budget,
        check_s=checking,
        notes=tuple(notes),
    )
