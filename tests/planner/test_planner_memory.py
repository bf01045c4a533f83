"""Memory terms, and the mistakes that other calculators make with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machines import ideal_machine, machine, small_llama
from twostroke.core.families import read_spec
from twostroke.core.rates import TrainingRates, TrainingStep
from twostroke.core.spec import MoeSpec
from twostroke.core.units import GIB
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.plan import training_memory
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.training.sharding import COMPILED_PRODUCT_BYTES
from twostroke.planner.work.params import count_parameters
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes


def test_llama_3_8b_needs_one_gib_of_kv_cache_at_8k(assets: Path) -> None:
    """Without the factor 2 it would be 0.5, with all 32 query heads 4, without grouped queries halved wrongly 2."""
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    assert kv_bytes_per_token(spec, "bf16") == 131_072
    assert 8192 * kv_bytes_per_token(spec, "bf16") == 1.00 * GIB
    scales = 32 * 2 * 8 * 4  # layers, keys and values, heads, bytes
    assert kv_bytes_per_token(spec, "int8") == 131_072 / 2 + scales
    assert kv_bytes_per_token(spec, "int4") == 131_072 / 4 + scales


def test_llama_3_70b_needs_320_kib_a_token(assets: Path) -> None:
    spec = read_spec(assets / "configs/hf/meta-llama--Meta-Llama-3.1-70B_config.json")
    assert kv_bytes_per_token(spec, "bf16") == 327_680


def test_grouped_queries_shrink_the_cache_and_not_the_queries() -> None:
    assert kv_bytes_per_token(small_llama(n_kv_heads=1)) * 4 == kv_bytes_per_token(small_llama(n_kv_heads=4))


def test_an_int8_weight_is_one_byte_and_its_scale_four_a_row() -> None:
    spec = small_llama()
    p = count_parameters(spec)
    rows = spec.n_layers * (3 * 256 + 256 + 2 * 704 + 256)
    kept = p.total - p.block_matrices
    assert weights_bytes(spec, "int8") == p.block_matrices + 4 * rows + 2 * kept
    assert weights_bytes(spec, "int8") > 0.5 * weights_bytes(spec, "bf16")


def test_weights_take_their_types_bytes() -> None:
    spec = small_llama()
    n = count_parameters(spec).total
    assert weights_bytes(spec, "fp32") == 4 * n
    assert weights_bytes(spec, "bf16") == 2 * n


def test_training_holds_masters_copies_gradients_and_moments() -> None:
    spec = small_llama()
    p = count_parameters(spec)
    mixed, single, muon = (
        training_memory(spec, TrainingShape(dtype=dtype, optimizer=optimizer), ideal_machine())
        for dtype, optimizer in (("bf16", "adamw"), ("fp32", "adamw"), ("bf16", "muon"))
    )
    assert mixed["weights"] == mixed["gradients"] == 6 * p.total
    assert single["weights"] == single["gradients"] == 4 * p.total
    assert mixed["optimizer"] == single["optimizer"] == 8 * p.total
    assert muon["optimizer"] == 8 * p.total - 4 * p.block_matrices


def test_activations_with_flash_attention_have_no_square(assets: Path) -> None:
    """A formula without flash attention gives 354 GiB for an 8 B model at 8k; one sequence takes tens of GB."""
    spec = read_spec(assets / "configs/hf/Meta-Llama-3-8B.json")
    memory = training_memory(spec, TrainingShape(1, 8192), load_hardware("h100"))
    assert 10 * GIB < memory["activations"] < 40 * GIB


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_eager_training_keeps_more(dtype: str) -> None:
    spec = small_llama()
    eager, compiled = (
        training_memory(spec, TrainingShape(dtype=dtype, compile=c), ideal_machine())["activations"] for c in (False, True)
    )
    assert eager > compiled


def test_the_compiled_products_of_experts_are_counted_on_a_cpu_in_16_bits() -> None:
    """Rows of an expert, 2,048 tokens at most: 16 to 128 by 16, to 256 by 16, then by 32, 64, 128: 40 numbers.
    Two matrices of an expert, each multiplied forward and for two gradients."""
    mixture, dense = small_llama(moe=MoeSpec(8, 2, 128)), small_llama()
    shape, here = TrainingShape(8, 512), ideal_machine()
    memory = training_memory(mixture, shape, here)
    assert memory["expert_products"] == 2 * 3 * 40 * COMPILED_PRODUCT_BYTES
    for spec, how, where in (
        (dense, shape, here), (mixture, TrainingShape(8, 512, dtype="fp32"), here), (mixture, shape, load_hardware("h100")),
    ):  # fmt: skip
        assert "expert_products" not in training_memory(spec, how, where)


def test_the_process_is_what_the_peaks_of_both_depths_leave_on_average() -> None:
    """The deeper anchor grew by less than was counted, as noise has it: the rest is the mean of the two, 450 MB."""
    shape, spec = TrainingShape(8, 256, compile=False), small_llama()
    shallow, deep = (TrainingStep(256, n, "bf16", "eager", 0.1, 0.1, 0.01, first_step_s=0.1) for n in (1, 3))

    def process(*peaks: float) -> float:
        steps = tuple(replace(step, peak_bytes=peak) for step, peak in zip((shallow, deep), peaks, strict=True))
        return training_memory(spec, shape, machine(training=TrainingRates(steps=steps)))["process"]

    one, other = process(900e6, 900e6), process(800e6, 900e6)
    assert one - other == pytest.approx(50e6)
