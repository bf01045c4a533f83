"""Flips by hand: FLOP per byte against the machine's balance, and the plans' own search for the same point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machines import ideal_machine, small_llama
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.planner.choosing.comparison import analytic_flips, balance_of, compare, component_flips, context_flips
from twostroke.planner.choosing.flips import decoding, flip_point, last_context, prefilling, training
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving import datasheet, step_time
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_time import Efficiencies, efficiencies_of
from twostroke.planner.training.shape import TrainingShape


def llama_8b() -> ModelSpec:
    return small_llama(
        vocab_size=128256, n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14336, max_positions=8192,
        tied_embeddings=False,
    )  # fmt: skip


@pytest.fixture
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving's fitted costs of starting and scheduling, set to nothing; experts' products are like any other."""

    def rates(hardware: Hardware, engine: str = "any") -> Efficiencies:
        found = efficiencies_of(hardware, engine)
        plain = found.arithmetic_share * found.fp8_share
        return replace(found, operator_s=0.0, step_s=0.0, request_s=0.0, reduce_s=0.0, grouped_share=plain)

    monkeypatch.setattr(step_time, "TILE_ROWS", 0)
    monkeypatch.setattr(datasheet, "efficiencies_of", rates)


def without_launches(name: str) -> Hardware:
    return replace(load_hardware(name), op_launch_s=0.0, linear_launch_s=0.0)


def test_a_dense_mlp_flips_at_half_the_balance_times_the_bytes_of_a_weight() -> None:
    """2·n·P FLOP over 2·P bytes of bf16: n FLOP a byte. fp32 weights take twice the batch."""
    assert flip_point(decoding(llama_8b(), "mlp", 512.0, "bf16", 2.0), 295.0) == pytest.approx(295.0, rel=1e-4)
    assert flip_point(decoding(llama_8b(), "mlp", 512.0, "fp32", 2.0), 295.0) == pytest.approx(590.0, rel=1e-4)


def test_attention_flips_by_context_as_computed_by_hand() -> None:
    """Llama-3-8B, balance b: P = 41.9 M weights, pair 16,384 FLOP and 4,096 bytes a key and layer. n·(2·P + 16384·c) ≥ b·(2·P +
    4096·n·c) gives n = 2·b·P/(2·P + 16384·c − 4096·b·c), and none where the denominator is not above 0."""
    spec, balance = llama_8b(), 295.0
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    for context in (1, 16, 60):
        by_hand = 2 * balance * weights / (2 * weights + 16384 * context - 4096 * balance * context)
        assert flip_point(decoding(spec, "attention", float(context), "bf16", 2.0), balance) == pytest.approx(by_hand, rel=1e-4)
    last = int(2 * weights / (4096 * balance - 16384))
    assert flip_point(decoding(spec, "attention", last + 1.0, "bf16", 2.0), balance) is None
    assert last_context(spec, balance, "bf16", 2.0) == pytest.approx(last, abs=1)


def test_experts_flip_about_as_many_times_later_as_there_are_to_one_that_is_passed() -> None:
    """8 of 256 experts: at n in the thousands all are touched, 2·n·8·P_e over 256·P_e·2 bytes: n = 32 times the balance."""
    sparse = small_llama(moe=MoeSpec(n_experts=256, top_k=8, d_expert=704), d_model=1024, n_heads=16, n_kv_heads=16)
    flip = flip_point(decoding(sparse, "mlp", 512.0, "bf16", 2.0), 300.0)
    assert flip == pytest.approx(32 * 300.0, rel=0.02)  # the router, read once and used by all, is the rest
    one_expert = small_llama(moe=MoeSpec(n_experts=8, top_k=8, d_expert=704))
    assert flip_point(decoding(one_expert, "mlp", 512.0, "bf16", 2.0), 300.0) == pytest.approx(300.0, rel=1e-3)


def test_few_tokens_leave_most_experts_unread() -> None:
    sparse = small_llama(moe=MoeSpec(n_experts=256, top_k=8, d_expert=704))
    one, many = (decoding(sparse, "mlp", 1.0, "bf16", 2.0)(n)[1] for n in (1.0, 1e6))
    assert many / one == pytest.approx(32, rel=0.02)


def test_a_prompts_head_never_flips_and_a_trained_sequence_flips_below_one() -> None:
    spec = llama_8b()
    assert flip_point(prefilling(spec, "head", "bf16"), 295.0) is None  # one row, whatever the prompt
    flip = flip_point(training(spec, "mlp", 4096, "bf16"), 295.0)
    assert flip is not None
    assert flip < 0.1


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("scheme", ["bf16", "int8", "int4"])
def test_by_hand_and_searched_agree_where_starting_costs_nothing(scheme: str) -> None:
    """A serving plan counts weights and cache as the hand does: within 5% for products; attention's prompt work has a rate of
    its own that shifts its balance with the prompt's length."""
    served, trained = ServingShape(scheme=scheme, prompt_tokens=512), TrainingShape(1, 16)
    table = compare(llama_8b(), trained, served, without_launches("h100"))
    searched, by_hand = component_flips(table.training, table.serving), analytic_flips(table.training, table.serving)
    for column, component, tolerance in (
        ("decode", "mlp", 0.05),
        ("decode", "head", 0.05),
        ("prefill", "mlp", 0.05),
        ("prefill", "attention", 0.15),
        ("train", "mlp", 0.25),  # the plan adds elementwise work, which by hand is left out
        ("train", "head", 0.1),
    ):
        found, expected = searched[column][component], by_hand[column][component]
        assert found is not None, (column, component)
        assert expected is not None
        assert found == pytest.approx(expected, rel=tolerance, abs=1), (column, component)


@pytest.mark.usefixtures("no_launches")
def test_they_agree_for_a_mixture_of_experts_too(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/mistralai--Mixtral-8x7B-v0.1_config.json")
    table = compare(spec, TrainingShape(1, 512), ServingShape(scheme="fp8"), without_launches("h200"))
    found, expected = component_flips(table.training, table.serving)["decode"]["mlp"], table.flips["analytic"]["decode"]["mlp"]
    assert found is not None
    assert found == pytest.approx(expected, rel=0.05)
    dense = compare(llama_8b(), TrainingShape(1, 512), ServingShape(scheme="fp8"), without_launches("h200"))
    assert expected == pytest.approx(4 * dense.flips["analytic"]["decode"]["mlp"], rel=0.03)  # 2 of 8 experts


def test_a_calibrated_machine_agrees_with_activations_apart() -> None:
    """The engine's plan also moves activations: 2·(n + k) bytes a token and matrix, a few percent of a wide model's."""
    hardware = ideal_machine()
    spec = small_llama(d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14336)
    table = compare(spec, TrainingShape(1, 64), ServingShape(), hardware)
    assert component_flips(table.training, table.serving)["decode"]["mlp"] == pytest.approx(
        table.flips["analytic"]["decode"]["mlp"], rel=0.1
    )


def test_latent_attention_flips_at_every_context_and_grouped_at_none_but_short_ones(assets: Path) -> None:
    """DeepSeek-V3 decodes against one latent for 128 heads, 242 FLOP a cached byte in bf16 against Llama's 4."""
    deepseek = read_spec(assets / "configs/hf/deepseek-ai--DeepSeek-V3_config.json")
    shape = ServingShape(scheme="fp8", tensor=8)
    assert context_flips(plan_serving(deepseek, shape, load_hardware("h200")))["last_context"] is None
    llama = context_flips(plan_serving(llama_8b(), ServingShape(), load_hardware("h200")))
    assert 0 < llama["last_context"] < 512
    assert [row["context"] for row in llama["contexts"]] == [128, 1024, 8191]
    assert llama["contexts"][-1]["analytic"] is None


def test_a_component_without_arithmetic_has_no_balance() -> None:
    table = compare(llama_8b(), TrainingShape(1, 64), ServingShape(), load_hardware("h100"))
    assert balance_of(table.serving.decode, "norms") is None
    assert balance_of(table.serving.decode, "absent") is None
