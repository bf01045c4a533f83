"""A step's time follows from bytes, operations and the shares that engines reach."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from scripts import script
from twostroke.core.errors import ConfigError
from twostroke.core.families import read_spec
from twostroke.core.matrices import layer_kinds
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import strategy_of
from twostroke.planner.serving.shape import ENGINES, Placement, ServingShape
from twostroke.planner.serving.step_time import (
    FITTED,
    MEASURED,
    device_bytes,
    devices_of_a_token,
    efficiencies,
    efficiencies_of,
    front_end_s,
    one_pass,
    shards,
)

IDEAL = dataclasses.replace(MEASURED, elementwise_share=math.inf)
"""The datasheet's rates, and nothing but products, cache and links."""
H100 = load_hardware("h100")
fit = script("planner/public_tables/fit.py")


@pytest.fixture
def llama_70b(assets: Path) -> ModelSpec:
    return read_spec(assets / "configs/hf/meta-llama--Meta-Llama-3.1-70B_config.json")


@pytest.fixture
def mixtral(assets: Path) -> ModelSpec:
    return read_spec(assets / "configs/hf/mistralai--Mixtral-8x7B-v0.1_config.json")


def test_one_token_of_70b_reads_all_its_weights(llama_70b: ModelSpec) -> None:
    """68.5 G block parameters and a head of 128,256 · 8,192 in bf16: 139.0 GB, 41.5 ms at 3.35 TB/s."""
    step = one_pass(llama_70b, "bf16", 2.0, Placement(), H100, decoding=1, context=1)
    assert sum(p.n_bytes for p in step.products) == pytest.approx(139.0e9, rel=1e-3)
    assert step.seconds(IDEAL) == pytest.approx(41.5e-3, rel=0.01)


def test_a_cache_element_is_read_once_by_a_step(llama_70b: ModelSpec) -> None:
    step = one_pass(llama_70b, "bf16", 2.0, Placement(), H100, decoding=16, context=1000)
    assert step.cache.n_bytes == 16 * 1000 * 327_680  # 2·80·8·128·2 bytes a token
    halved = one_pass(llama_70b, "bf16", 1.0, Placement(tensor=8), H100, decoding=16, context=1000)
    assert halved.cache.n_bytes == pytest.approx(16 * 1000 * 327_680 / 16)  # one byte, one of eight key heads


def test_key_heads_are_copied_where_there_are_fewer_than_devices(llama_70b: ModelSpec) -> None:
    eight, sixteen = (shards(llama_70b, "bf16", Placement(t))[0].cache_elements for t in (8, 16))
    assert eight == sixteen == 2 * 128


def test_tensor_parallelism_divides_the_weights(llama_70b: ModelSpec) -> None:
    assert device_bytes(llama_70b, "fp8", Placement(8)) == pytest.approx(device_bytes(llama_70b, "fp8", Placement(1)) / 8)
    halved = device_bytes(llama_70b, "bf16", Placement(1)) / device_bytes(llama_70b, "fp8", Placement(1))
    assert halved == pytest.approx(2, rel=1e-3)  # less its scales


def test_int8_is_a_byte_and_int4_a_half_with_its_scales(llama_70b: ModelSpec) -> None:
    """Other calculators count compressed int8 weights as half a byte."""
    whole = device_bytes(llama_70b, "bf16", Placement(1))
    assert device_bytes(llama_70b, "int8", Placement(1)) / whole == pytest.approx(1 / 2, rel=1e-3)  # and a scale a row
    assert 1 / 4 < device_bytes(llama_70b, "int4", Placement(1)) / whole < 0.27


def test_a_bf16_prompt_runs_at_the_bf16_peak(llama_70b: ModelSpec) -> None:
    """2·68.5e9·4096 FLOP at 989 TFLOP/s are 567 ms; the fp32 peak of the same device, 67, would make it 8.4 s."""
    prompt = one_pass(llama_70b, "bf16", 2.0, Placement(), H100, prompt_tokens=4096)
    products = sum(prompt.product_s(p, IDEAL) for p in prompt.products if p.component != "head")
    assert products == pytest.approx(0.567, rel=0.01)


def test_experts_that_a_batch_touches(mixtral: ModelSpec) -> None:
    """2 of 8 experts for one token; four leave out 6/8 · 1/(1 + 3·ln(8/6)) of them, where 5.47 would be needed if all were
    chosen equally often; nearly all are needed for 256."""
    shard = shards(mixtral, "bf16", Placement())[0]
    assert [8 * shard.touched(b) for b in (1, 4)] == pytest.approx([2.0, 8 - 6 / (1 + 3 * math.log(8 / 6))])
    assert 0.9 < shard.touched(32) < shard.touched(256) < 1
    assert shard.touched(256) > 0.98
    one, many = (
        sum(p.n_bytes for p in one_pass(mixtral, "bf16", 2.0, Placement(), H100, decoding=b).products) for b in (1, 10_000)
    )
    # 12.9 G active parameters against 46.7 G, without the input embedding
    assert (one, many) == (pytest.approx(2 * 12.75e9, rel=0.01), pytest.approx(2 * 46.57e9, rel=0.01))


def test_latent_attention_keeps_one_vector_on_every_device(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/deepseek-ai--DeepSeek-V3_config.json")
    for tensor in (1, 8):
        assert sum(s.count * s.cache_elements for s in shards(spec, "fp8", Placement(tensor))) == 61 * (512 + 64)


def test_an_expert_is_whole_on_its_device_or_cut_over_all(mixtral: ModelSpec) -> None:
    """Eight experts over eight devices: one each, or an eighth of each. The bytes are the same; the device whose expert more
    tokens choose has more to compute than an even share, which a cut has not."""
    cut, whole = (shards(mixtral, "bf16", Placement(tensor=8, expert=e))[0] for e in (1, 8))
    assert (cut.experts, whole.experts) == (8, 1)
    assert cut.experts * cut.expert_bytes == pytest.approx(whole.experts * whole.expert_bytes)
    work = {name: s.busiest(64)[1] * s.expert_elements for name, s in (("cut", cut), ("whole", whole))}
    assert work["whole"] > work["cut"]
    assert work["whole"] < 2 * work["cut"]
    both = shards(mixtral, "bf16", Placement(tensor=8, expert=4))[0]
    assert (both.experts, both.expert_ranks) == (2, 4)
    assert both.expert_bytes == pytest.approx(whole.expert_bytes / 2)


def test_few_tokens_of_an_expert_cost_a_tile(mixtral: ModelSpec) -> None:
    """Each expert that is needed computes half a tile more than its tokens: one token costs as much arithmetic as 65."""
    step = one_pass(mixtral, "bf16", 2.0, Placement(), H100, decoding=1, context=1)
    experts = next(p for p in step.products if p.grouped)
    assert (experts.arithmetic_s + experts.padding_s) * H100.peak("bf16") == pytest.approx(65 * experts.flops)


def test_all_reduces_inside_a_node_start_once_whatever_their_number(llama_70b: ModelSpec) -> None:
    rates = dataclasses.replace(IDEAL, reduce_s=1e-3)
    two, eight = (one_pass(llama_70b, "fp8", 1.0, Placement(t), H100, decoding=1, context=1) for t in (2, 8))
    assert two.network_s(rates) == pytest.approx(160e-3, rel=0.001)  # two a layer
    assert eight.network_s(rates) == pytest.approx(160e-3, rel=0.001)


def test_a_window_bounds_what_is_read(llama_70b: ModelSpec) -> None:
    windowed = llama_70b.with_(sliding_window=512)
    step = one_pass(windowed, "bf16", 2.0, Placement(), H100, decoding=1, context=8192)
    assert step.cache.n_bytes == 512 * 327_680


def test_prompts_beside_a_step_share_its_weights(llama_70b: ModelSpec) -> None:
    at = Placement(tensor=4)
    step = one_pass(llama_70b, "fp8", 1.0, at, H100, decoding=8, context=1000)
    mixed = one_pass(llama_70b, "fp8", 1.0, at, H100, decoding=8, context=1000, prompt_tokens=1000)
    alone = one_pass(llama_70b, "fp8", 1.0, at, H100, prompt_tokens=1000)
    rates = efficiencies("vllm", "h100-sxm")
    assert step.seconds(rates) < mixed.seconds(rates) < step.seconds(rates) + alone.seconds(rates)
    assert fit.token_s(step, mixed, rates, 0.0) == step.seconds(rates)
    assert fit.token_s(step, mixed, rates, 7 / 100) > step.seconds(rates)


def test_pipelines_pay_for_sends_and_reread_nothing_twice(llama_70b: ModelSpec) -> None:
    """Two stages, each half of the layers on half of the requests: weights are read for each half, so a token that is bound by
    bytes takes as long as on one stage, plus sends."""
    one = one_pass(llama_70b, "fp8", 1.0, Placement(), H100, decoding=2, context=10)
    two = one_pass(llama_70b, "fp8", 1.0, Placement(pipeline=2), H100, decoding=2, context=10)
    assert two.seconds(IDEAL) == pytest.approx(one.seconds(IDEAL), rel=0.01)
    assert two.network_s(IDEAL) > one.network_s(IDEAL) == 0


def test_data_parallel_attention_exchanges_tokens_with_the_experts(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/deepseek-ai--DeepSeek-V3_config.json")
    spread = one_pass(spec, "fp8", 1.0, Placement(tensor=1, expert=8), H100, decoding=64, context=1000)
    together = one_pass(spec, "fp8", 1.0, Placement(tensor=8), H100, decoding=64, context=1000)
    assert spread.exchanges.fitted_starts == 2 * 58  # 58 of 61 layers have experts
    assert together.exchanges.seconds(IDEAL) == 0
    # 8 tokens a device, each on 8·(1 − (7/8)⁸) of 8 devices, of which 7 are others; there in fp8, back in bf16
    assert devices_of_a_token(8, 8) == pytest.approx(5.251, rel=1e-3)
    there_and_back = 8 * 7168 * (1 + 2) * 5.251 * 7 / 8
    assert spread.exchanges.sending_s == pytest.approx(58 * there_and_back / H100.link.bytes_per_s, rel=1e-3)
    assert devices_of_a_token(8, 1) == 1
    assert devices_of_a_token(1, 8) == pytest.approx(1)
    assert spread.cache.n_bytes == pytest.approx(together.cache.n_bytes / 8)  # each group keeps only its own requests


def test_a_device_without_fp8_computes_in_bf16(llama_70b: ModelSpec) -> None:
    a100 = load_hardware("a100-sxm-80gb")
    assert one_pass(llama_70b, "fp8", 1.0, Placement(), a100, decoding=1).products[0].width == 2
    assert one_pass(llama_70b, "fp8", 1.0, Placement(), H100, decoding=1).products[0].width == 1
    assert one_pass(llama_70b, "int4", 2.0, Placement(), H100, decoding=1).products[0].width == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("device", ["h100-sxm", "b200-sxm", "mi300x"])
def test_no_share_is_above_one(engine: str, device: str) -> None:
    for name in FITTED:
        value = getattr(efficiencies(engine, device), name)
        assert 0 < value <= (2.0 if name == "fp4_grouped_factor" else 1.0), name


def test_a_host_that_overlaps_adds_less_than_its_time(llama_70b: ModelSpec) -> None:
    step = one_pass(llama_70b, "fp8", 1.0, Placement(8), H100, decoding=256, context=1000)
    rates = efficiencies("sglang", "h100-sxm")
    device_s, host_s = step.device_s(rates), step.around_s(rates)
    assert max(device_s, host_s) < step.seconds(rates) < device_s + host_s
    assert step.host_s(rates) == pytest.approx(step.seconds(rates) - device_s)
    apart = dataclasses.replace(rates, host_edge=1.0)
    assert step.seconds(apart) == device_s + host_s
    assert step.host_s(apart) == host_s


def test_tensor_parallel_leaves_tiles_of_latent_attention_unfilled(assets: Path) -> None:
    """128 heads are 64 or more on up to two devices; a 16th of them would be 8, and takes a tile of 64."""
    spec = read_spec(assets / "configs/hf/deepseek-ai--DeepSeek-V3_config.json")

    def flops(tensor: int) -> float:
        return one_pass(spec, "fp8", 2.0, Placement(tensor), H100, decoding=8, context=4000).cache.flops

    assert flops(1) == pytest.approx(2 * flops(2))
    assert flops(2) == flops(4) == flops(8)


def test_an_indexer_scores_all_keys_and_attends_latently_to_what_it_chose(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/zai-org--GLM-5_config.json")
    (kind, _), *_ = layer_kinds(spec)
    assert kind.top_keys is not None
    assert kind.latent_dim is not None
    step = one_pass(spec, "fp8", 2.0, Placement(), H100, decoding=1, context=9000)
    attended = kind.decode_flops_per_key * kind.top_keys
    assert step.cache.flops == pytest.approx(spec.n_layers * (attended + kind.index_flops_per_key * 9000))
    short, long = (
        one_pass(spec, "fp8", 2.0, Placement(), H100, prompt_tokens=n).prompts.flops for n in (kind.top_keys, 4 * kind.top_keys)
    )
    pairs = kind.top_keys**2 / 2
    assert short == pytest.approx(spec.n_layers * pairs * (kind.flops_per_key + kind.index_flops_per_key))
    read = 4 * kind.top_keys**2 - pairs  # of each query top_keys at most
    assert long == pytest.approx(spec.n_layers * (read * kind.decode_flops_per_key + 16 * pairs * kind.index_flops_per_key))


def test_unknown_engines_and_schemes_are_refused(llama_70b: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        efficiencies("vlm")
    with pytest.raises(ConfigError, match="int3"):
        shards(llama_70b, "int3", Placement())


@pytest.mark.parametrize(
    ("device", "engine", "tensor", "batch", "prompt", "output", "measured_ms"),
    [("h100", "vllm", 4, 16, 1024, 1024, 13.19), ("h200", "vllm", 2, 8, 8192, 1024, 19.67),
     ("h200", "trtllm", 1, 32, 1024, 1024, 25.80), ("b200", "trtllm", 4, 64, 1024, 8192, 10.47)],
)  # fmt: skip
def test_measured_points_of_70b_fp8_are_met(
    llama_70b: ModelSpec, device: str, engine: str, tensor: int, batch: int, prompt: int, output: int, measured_ms: float
) -> None:
    """Four rows of the public table, in sample: 15% holds the code to the constants, the benchmark reports the errors."""
    hardware, at = load_hardware(device), Placement(tensor=tensor)
    common = {"decoding": batch, "context": prompt + output / 2}
    step = one_pass(llama_70b, "fp8", 1.0, at, hardware, **common)
    mixed = one_pass(llama_70b, "fp8", 1.0, at, hardware, **common, prompt_tokens=prompt)
    found = fit.token_s(step, mixed, efficiencies_of(hardware, engine), (batch - 1) / output)
    assert 1e3 * found == pytest.approx(measured_ms, rel=0.15)


def test_a_front_end_delays_first_tokens_of_measured_engines_alone(llama_70b: ModelSpec, mixtral: ModelSpec) -> None:
    shape = ServingShape(engine="vllm", tensor=8)
    assert strategy_of(llama_70b, shape, H100).front_end_s == front_end_s("vllm") > 0
    assert strategy_of(llama_70b, dataclasses.replace(shape, engine="any"), H100).front_end_s == front_end_s() > 0
    assert strategy_of(llama_70b, shape, load_hardware("rtx-4090")).front_end_s == 0
    with_experts = front_end_s("vllm", experts=True)
    assert strategy_of(mixtral, shape, H100).front_end_s == with_experts > front_end_s("vllm")


def test_a_share_of_free_memory_leaves_more_than_one_of_all(llama_70b: ModelSpec) -> None:
    """TensorRT-LLM's tenth that stays free is of what weights leave."""
    of_all, of_free = (strategy_of(llama_70b, ServingShape(engine=name, tensor=8), H100) for name in ("vllm", "trtllm"))
    taken = of_all.weights_bytes() + H100.process.resident_bytes
    assert of_free.room_for_kv() - of_all.room_for_kv() == pytest.approx(0.1 * taken)
