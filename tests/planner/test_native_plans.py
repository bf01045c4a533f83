"""Plans of the native engine: bytes as it holds them, times by their formulas."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from formulas import evaluate
from machines import W0, native, small_llama
from small_models import FEATURES, SPECS, saved
from twostroke.core.crossovers import Crossovers
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.matrices import block_matrices
from twostroke.core.policy import logits_bytes
from twostroke.core.profile import BandwidthPoint, MatmulPoint
from twostroke.core.rates import CachePrice, NativePass, Process, StepPrices
from twostroke.core.schemes import NATIVE
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.engine.core import EngineCore
from twostroke.engine.kv_pool import token_bytes
from twostroke.kernels.codes import Codes
from twostroke.kernels.int4 import quantize_groups
from twostroke.kernels.native_library import library, why_absent
from twostroke.planner.hardware.anchors import PREFILL_ANCHORS, UNITS
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.native import (
    FAULT_BYTES,
    Native,
    anchored,
    attention_flop,
    chunks,
    embedding_in_memory_bytes,
)
from twostroke.planner.serving.native_products import (
    native_product_s,
    native_read_bytes,
    native_reuse_bytes,
    native_weights_bytes,
    packed_bytes,
)
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape, Speculation
from twostroke.planner.serving.strategy import Chunk
from twostroke.planner.truth.explain import explain
from twostroke.planner.work.component import total_seconds
from twostroke.planner.work.flops import row_flop
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.fitting import Fitted
from twostroke.quantization.held import held
from twostroke.scheduling.sampling_params import SamplingParams


def test_what_is_read_between_two_uses_of_an_expert_is_what_a_simulated_router_reads() -> None:
    """Experts are chosen at random, as the formula takes them; the layer's other weights are read in every step."""
    n_experts, top_k, rows, n_steps = 16, 2, 3, 4000
    spec = small_llama(moe=MoeSpec(n_experts, top_k, 128))
    dense = small_llama()
    read, held = (of(spec, "bf16", "bf16") for of in (native_read_bytes, native_weights_bytes))
    expert = (held - read) / (n_experts - top_k)
    draw, last, others = random.Random(0), dict[int, int](), list[int]()
    steps = [{e for _ in range(rows) for e in draw.sample(range(n_experts), top_k)} for _ in range(n_steps)]
    for now, touched in enumerate(steps):
        for one in touched:
            if one in last:
                others.append(len(set().union(*steps[last[one] + 1 : now + 1])))
            last[one] = now
    expected = read + expert * (sum(others) / len(others) - top_k)
    assert native_reuse_bytes(spec, "bf16", "bf16", rows) == pytest.approx(expected, rel=0.02)
    assert native_reuse_bytes(spec, "bf16", "bf16", 512) == pytest.approx(held, rel=1e-6)
    assert native_reuse_bytes(dense, "bf16", "bf16", rows) == native_read_bytes(dense, "bf16", "bf16")


def plan(spec: ModelSpec | None = None, hardware: Hardware | None = None, **changes: object) -> ServingPlan:
    return plan_serving(spec or small_llama(), ServingShape(**changes), hardware or native())  # type: ignore[arg-type]


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("head", ["auto", "int8", "int4"])
@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8", "int8_weight_only", "int4"])
@pytest.mark.parametrize("family", list(SPECS))
def test_weights_are_those_that_the_engine_holds(tmp_path: Path, family: str, scheme: str, head: str) -> None:
    directory = saved(family, tmp_path / "m")[1]
    core = EngineCore(directory, EngineSettings(dtype=scheme, head_dtype=head, n_threads=1, kv_cache_bytes=2**20))
    shape = ServingShape(scheme=scheme, head_dtype=head)
    assert native_read_bytes(core.spec, scheme, shape.head) == core.plan.step_bytes
    assert native_weights_bytes(core.spec, scheme, shape.head) == core.weights_bytes


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("family", list(FEATURES))
def test_weights_of_later_families_are_those_that_the_engine_holds(tmp_path: Path, family: str) -> None:
    core = EngineCore(saved(family, tmp_path / "m")[1], EngineSettings(dtype="int8", n_threads=1, kv_cache_bytes=2**20))
    assert native_read_bytes(core.spec, "int8", ServingShape(scheme="int8").head) == core.plan.step_bytes
    assert native_weights_bytes(core.spec, "int8", ServingShape(scheme="int8").head) == core.weights_bytes


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-g32", "int4-g128"])
def test_a_quantised_directory_is_planned_as_it_is(tmp_path: Path, scheme: str) -> None:
    from twostroke.model.decoder import Decoder
    from twostroke.model.initialise import initialise
    from twostroke.model.save import save_model

    decoder = Decoder(small_llama(vocab_size=128))
    initialise(decoder, 0)
    quantize_model(save_model(decoder, decoder.spec, tmp_path / "m", "bf16"), tmp_path / "q", scheme)
    core = EngineCore(tmp_path / "q", EngineSettings(n_threads=1, kv_cache_bytes=2**20, kv_dtype="int8"))
    found = held(tmp_path / "q", core.spec)
    assert found.in_int8 == ()
    planned = plan(core.spec, scheme=found.scheme, kv_dtype="int8", kv_cache_bytes=2**20, prompt_tokens=64, output_tokens=8)
    assert planned.memory_bytes["weights"] == core.weights_bytes
    assert planned.kv_cache_bytes == core.kv_cache_bytes
    on_disk = sum(file.stat().st_size for file in (tmp_path / "q").glob("*.safetensors"))
    assert planned.model_bytes == pytest.approx(on_disk, rel=0.02)  # names and shapes beside the numbers


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("batch", [1, 3])
def test_the_logits_of_a_step_are_planned_as_the_engine_holds_them(tmp_path: Path, batch: int) -> None:
    core = EngineCore(saved("llama", tmp_path / "m")[1], EngineSettings(n_threads=1, kv_cache_bytes=2**20, runner="native"))
    for i in range(batch):
        core.add_request(str(i), [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    while core.has_work:
        core.step()
    planned = plan(core.spec, batch=batch, prompt_tokens=3, output_tokens=3, kv_cache_bytes=2**20)
    assert planned.memory_bytes["logits"] == core._runner._logits.nbytes  # type: ignore[union-attr]
    config = core.scheduler.config
    most = plan(core.spec, batch=config.max_running, prompt_tokens=3, output_tokens=3).memory_bytes["logits"]
    assert core.logits_bytes == most + logits_bytes(core.spec.vocab_size, config.max_scored_rows)


def test_drafted_tokens_have_logits_of_their_own() -> None:
    spec = small_llama()
    one = plan(spec, load_hardware("h100"), batch=8).memory_bytes["logits"]
    drafted = plan(spec, load_hardware("h100"), batch=8, speculation=Speculation(3, 0.7, 0.1)).memory_bytes["logits"]
    assert (one, drafted) == (8 * 4 * spec.vocab_size, 4 * one)


MIXED = ("blocks.0.attn.qkv.weight", "blocks.1.mlp.down.weight", "blocks.2.mlp.gate_up.weight", "blocks.2.mlp.up.weight")


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("group", [32, 64])
def test_a_directory_of_int4_and_int8_is_planned_matrix_by_matrix(tmp_path: Path, family: str, group: int) -> None:
    decoder, source = saved(family, tmp_path / "m")
    in_int8 = frozenset(name for name in MIXED if name in decoder.state_dict())
    named = {n: w.detach() for n, w in decoder.named_parameters() if w.dim() == 2 and "blocks" in n}
    codes = {n: Codes(*quantize_groups(w, group)) for n, w in named.items()}
    fitted = Fitted({n: found for n, found in codes.items() if n not in in_int8}, in_int8, None, 100)
    quantize_model(source, tmp_path / "q", f"int4-g{group}", fitted=fitted)
    core = EngineCore(tmp_path / "q", EngineSettings(n_threads=1, kv_cache_bytes=2**20))
    found = held(tmp_path / "q", core.spec)
    assert found.scheme == f"int4-g{group}"
    assert set(found.in_int8) == {"0.qkv", "1.down", "2.up" if family == "gpt2" else "2.gate_up"}
    planned = plan(core.spec, prompt_tokens=64, output_tokens=8, **found._asdict())
    assert planned.memory_bytes["weights"] == core.weights_bytes
    assert native_read_bytes(core.spec, planned.shape.scheme, planned.shape.head, planned.shape.others) == core.plan.step_bytes
    alone = [plan(core.spec, scheme=scheme, prompt_tokens=64, output_tokens=8) for scheme in (found.scheme, "int8")]
    assert alone[0].model_bytes < planned.model_bytes < alone[1].model_bytes
    uses = {
        (use.product.name, use.name): use.times for use in Native(core.spec, planned.shape, planned.hardware).uses("decode")
    }
    for product in ("qkv", "down"):
        assert (uses[product, "native_int8"], uses[product, f"native_int4_g{group}"]) == (1, core.spec.n_layers - 1)
    for term in explain(planned):
        assert evaluate(term.formula, term.substitutions) == pytest.approx(term.value, rel=1e-9, abs=1e-15), term.symbol


def test_matrices_in_int8_take_their_own_time() -> None:
    spec = small_llama()
    points = tuple(MatmulPoint("native_int8", m, 512, 512, 1e10) for m in (1, 512))
    slow = dataclasses.replace(native(), matmul=(*(p for p in native().matmul if p.scheme != "native_int8"), *points))
    every = tuple(f"{layer}.{p.name}" for layer in range(spec.n_layers) for p in block_matrices(spec))
    times = [plan(spec, slow, scheme="int4", in_int8=every[:n]).tpot_s for n in (0, 1, len(every))]
    assert times[0] < times[1] < times[2]
    assert times[2] == pytest.approx(plan(spec, slow, scheme="int8").tpot_s)
    with pytest.raises(ConfigError, match=r"in_int8='9\.down' must be a matrix of the model"):
        plan(spec, scheme="int4", in_int8=("9.down",))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("family", list(SPECS))
def test_a_cached_token_takes_what_the_pool_gives_it(family: str, dtype: str) -> None:
    assert kv_bytes_per_token(SPECS[family], dtype) == token_bytes(SPECS[family], dtype)


def test_a_product_follows_the_bandwidth_where_reading_binds_it_and_stays_where_arithmetic_does() -> None:
    n_bytes = packed_bytes("native_int8", 512, 512)
    reading = native(2.0 * 512 * 512 / (n_bytes / 40e9))  # one row as fast as its bytes come
    assert native_product_s("native_int8", 1, 512, 512, W0, reading) == pytest.approx(n_bytes / 40e9)
    assert native_product_s("native_int8", 1, 512, 512, 1e9, reading) == pytest.approx(n_bytes / 20e9)
    slow = native(1e9)
    assert native_product_s("native_int8", 1, 512, 512, 1e9, slow) == pytest.approx(2 * 512 * 512 / 1e9, rel=0.01)


def test_a_products_time_goes_from_the_measured_one_in_cache_to_the_measured_one_over_memory() -> None:
    in_cache, from_memory = 4e12, 1e12
    passes = tuple(
        NativePass("native_int8", n_threads, 4e6, m, 512, 512, in_cache / (3 - n_threads))
        for n_threads in (1, 2)
        for m in (1, 512)
    )
    base = native(from_memory)
    rates = dataclasses.replace(base.native_rates, passes=passes, n_threads=2)
    points = (BandwidthPoint(int(4e6), 200e9), BandwidthPoint(int(W0), 20e9))
    machine = dataclasses.replace(base, native=rates, read_bandwidth=points)
    flop = 2.0 * 512 * 512 * 512
    times = [native_product_s("native_int8", 512, 512, 512, size, machine) for size in (1e6, 4e6, 3e7, W0)]
    assert times[0] == times[1] == pytest.approx(flop / in_cache)
    assert times[1] < times[2] < times[3] == pytest.approx(flop / from_memory)
    assert native_product_s("native_int8", 512, 512, 512, 4e6, machine, one_thread=True) == pytest.approx(2 * flop / in_cache)


def test_a_small_step_is_planned_on_one_thread_as_the_engine_takes_it() -> None:
    passes = tuple(NativePass("native_bf16", n, 4e6, 1, 512, 512, n * 1e12) for n in (1, 2))
    base = native()
    rates = dataclasses.replace(base.native_rates, passes=passes, n_threads=2)
    machine = dataclasses.replace(base, native=rates)
    few, many = (Native(small_llama(), ServingShape("bf16", b, in_server=False), machine) for b in (1, 64))
    assert {use.one_thread for use in few.uses("decode")} == {True}
    assert {use.one_thread for use in many.uses("decode")} == {False}
    assert few.units("decode")["barrier"] == 0 < many.units("decode")["barrier"]


def test_no_step_is_planned_faster_than_its_bytes_can_be_read() -> None:
    for scheme in NATIVE:
        p = plan(scheme=scheme, hardware=native(1e18))
        floor = sum(w.memory_s for w in p.decode)
        assert p.tpot_s >= floor * (1 - 1e-9)
        assert floor >= native_read_bytes(p.spec, scheme, p.shape.head) / 40e9


def test_what_surrounds_products_costs_its_fitted_price() -> None:
    spec = small_llama()
    plain = plan(spec, batch=3, prompt_tokens=100, output_tokens=1)
    prices = StepPrices("decode", step_s=1e-3, row_s=1e-4, layer_s=1e-5)
    dear = plan(spec, native(prices=(prices,)), batch=3, prompt_tokens=100, output_tokens=1)
    assert dear.tpot_s - plain.tpot_s == pytest.approx(1e-3 + 3e-4 + spec.n_layers * 1e-5)
    assert dear.ttft_s == plain.ttft_s


def test_schemes_and_heads_and_caches_change_the_plan() -> None:
    base = plan(prompt_tokens=800, batch=8)
    assert (
        plan(prompt_tokens=800, batch=8, kv_dtype="int8").memory_bytes["kv_cache"]
        < 0.6 * base.memory_bytes["kv_cache"]
        < base.kv_cache_bytes
    )
    in_codes = {name: plan(prompt_tokens=800, batch=8, kv_dtype=name) for name in ("int8", "int4")}
    assert in_codes["int4"].kv_bytes_per_token < 0.7 * in_codes["int8"].kv_bytes_per_token
    assert in_codes["int4"].memory_bytes["kv_cache"] < in_codes["int8"].memory_bytes["kv_cache"]
    assert in_codes["int4"].tpot_s <= in_codes["int8"].tpot_s <= base.tpot_s
    assert plan(head_dtype="int8").memory_bytes["weights"] < base.memory_bytes["weights"]
    sizes = [plan(scheme=f"int4-g{group}").memory_bytes["weights"] for group in (32, 64, 128)]
    assert sizes == sorted(sizes, reverse=True)
    assert plan(scheme="int4").memory_bytes["weights"] == sizes[1]


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_attention_counts_the_pairs_that_see_each_other(start: int, window: int | None) -> None:
    spec = small_llama(n_layers=2)
    if window:
        spec = spec.with_(sliding_window=window, sliding_window_layers=(0, 1))
    pairs = sum(min(start + i, window or 10**9) for i in range(1, 9))
    assert attention_flop(spec, start, 8) == 4 * spec.n_heads * spec.head_dim * 2 * pairs


def test_a_prompt_is_computed_in_steps_of_the_token_budget() -> None:
    assert chunks(ServingShape(prompt_tokens=1200)) == [(0, 512), (512, 512), (1024, 176)]
    assert chunks(ServingShape(prompt_tokens=512)) == [(0, 512)]
    assert chunks(ServingShape(prompt_tokens=64, prefix_hit_share=0.9)) == [(48, 16)]


def test_a_prompt_of_an_anchors_shape_takes_what_was_measured() -> None:
    anchor = PREFILL_ANCHORS[1]
    hardware = native(steps=(anchor.taking("int8", 0.123),))
    engine = anchored(anchor, ServingShape(scheme="int8"), hardware)
    assert total_seconds(engine.as_planned("prefill")) != pytest.approx(0.123)
    assert plan_serving(anchor.spec, engine.shape, hardware).ttft_s == pytest.approx(0.123)


def test_a_server_is_planned_on_one_thread_for_more_steps() -> None:
    hardware = native(crossovers=Crossovers(one_thread_max_flop=0.0, server_row_flop=1e9))
    hardware = dataclasses.replace(hardware, native=dataclasses.replace(hardware.native_rates, n_threads=2))
    server, alone = (
        Native(small_llama(), ServingShape(prompt_tokens=16, in_server=in_server), hardware) for in_server in (True, False)
    )
    assert (server.on_all_threads(1, 1), alone.on_all_threads(1, 1)) == (False, True)
    anchor = next(a for a in PREFILL_ANCHORS if a.rows == 16)
    assert anchored(anchor, server.shape, hardware).on_all_threads(1, 1)  # calibration runs engines without a server


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_cache_in_codes_costs_what_calibration_found_it_to(dtype: str) -> None:
    prices = tuple(StepPrices(phase, attention_s=1e-9) for phase in ("prefill", "decode"))
    plain = native(prices=prices)
    caches = CachePrice("decode", "int8", 2e-11), CachePrice("prefill", "int8", 3e-12)
    dear = dataclasses.replace(plain, native=dataclasses.replace(plain.native_rates, caches=caches))
    shape = ServingShape(prompt_tokens=400, output_tokens=200, batch=3, kv_dtype=dtype)
    one, other = (Native(small_llama(), shape, hardware) for hardware in (plain, dear))
    more = {
        phase: one.units(phase)["cached"] * price.more_s for phase, price in zip(("decode", "prefill"), caches, strict=True)
    }
    is_dear = dtype == "int8"
    assert other.tpot_s() - one.tpot_s() == pytest.approx(is_dear * more["decode"], abs=1e-12)
    assert total_seconds(other.prefill()) - total_seconds(one.prefill()) == pytest.approx(is_dear * more["prefill"], abs=1e-12)
    steps = [engine.step_seconds(3, 500.0, [Chunk(0, 400, 1)]) for engine in (one, other)]
    assert steps[1] - steps[0] == pytest.approx(is_dear * sum(more.values()), rel=0.01, abs=1e-12)


def test_a_prompt_touches_new_pages_of_the_cache_and_a_step_under_load_does_not() -> None:
    """2·L·K·D numbers a token that is not found in the cache, in pages of 4 KiB, of which each thread touches its own."""
    spec, shape = small_llama(), ServingShape(prompt_tokens=256, prefix_hit_share=0.5)
    hardware = native(process=Process(page_fault_s=2e-6))
    touched, plain = (plan_serving(spec, shape, one) for one in (hardware, native()))
    threads = 1 if hardware.crossovers.takes_one_thread(0.0, 128 * row_flop(spec), 0) else hardware.native_rates.n_threads
    new_s = 128 * kv_bytes_per_token(spec) / 4096 * 2e-6 / threads
    assert touched.ttft_s - plain.ttft_s == pytest.approx(new_s)
    assert touched.tpot_s == pytest.approx(plain.tpot_s)
    steps = [Native(spec, shape, one).step_seconds(1, 64.0, [Chunk(0, 128, 1)]) for one in (hardware, native())]
    assert steps[0] == pytest.approx(steps[1])


def test_looking_up_more_tokens_brings_in_more_of_the_table_and_never_more_than_all() -> None:
    spec = small_llama(vocab_size=49152)
    table = 2 * spec.vocab_size * spec.d_model
    sizes = [embedding_in_memory_bytes(spec, n) for n in (0, 1, 100, 10_000, 10**6)]
    assert sizes[:2] == pytest.approx([0, FAULT_BYTES])
    assert sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(table)


def test_work_is_counted_once_by_component() -> None:
    p = plan(batch=2, prompt_tokens=50, output_tokens=1, scheme="int8")
    assert p.decode == Native(p.spec, p.shape, p.hardware).as_planned("decode")
    read = sum(w.bytes for w in p.decode if w.component != "head")
    head = packed_bytes("native_bf16", p.spec.vocab_size, p.spec.d_model)
    norms = 4 * p.spec.d_model * (2 * p.spec.n_layers + 1)
    kv = 2 * 51 * kv_bytes_per_token(p.spec)
    assert read == pytest.approx(native_read_bytes(p.spec, "int8", "bf16") - head - norms + kv)


def test_what_only_our_engine_serves_is_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="our engine's own"):
        plan_serving(small_llama(), ServingShape(scheme="int4-g32"), load_hardware("h100"))
    with pytest.raises(ConfigError, match="head_dtype='nvfp4'"):
        ServingShape(head_dtype="nvfp4")
    assert weights_bytes(small_llama(), "int4-g32") > weights_bytes(small_llama(), "int4-g128")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheme": "int8", "batch": 8, "kv_dtype": "int8", "head_dtype": "int8", "kv_cache_bytes": 2**22},
        {"scheme": "int4-g32", "prompt_tokens": 900, "output_tokens": 3},
        {"scheme": "int8_weight_only", "prompt_tokens": 64, "prefix_hit_share": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_every_formula_gives_the_plans_number(family: str, changes: dict[str, object]) -> None:
    prices = tuple(
        StepPrices(phase, **{f"{unit}_s": 1e-9 * (i + 1) for i, unit in enumerate(units)}) for phase, units in UNITS.items()
    )
    steps = tuple(PREFILL_ANCHORS[i].taking("int8", 0.01 * (i + 1)) for i in range(4))
    hardware = native(steps=steps, prices=prices)
    spec = SPECS[family].with_(max_positions=1024, sliding_window=None, sliding_window_layers=())
    terms = explain(plan(spec, hardware, **changes))
    for term in terms:
        assert evaluate(term.formula, term.substitutions) == pytest.approx(term.value, rel=1e-9), term.symbol
    assert terms["ttft_s"].value == plan(spec, hardware, **changes).ttft_s
    assert len(list(terms)) > 30
