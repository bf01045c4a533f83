"""What a step is said to read and compute, held against the packed bytes of every scheme and against counting by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from machines import machine, small_llama
from small_models import SPECS, saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.schemes import CACHE_TYPES
from twostroke.engine import plan as p
from twostroke.engine.achieved import Achieved, PhaseRates, achieved, product_of
from twostroke.engine.core import EngineCore
from twostroke.engine.kv_pool import KVPool
from twostroke.engine.meters import StepMeter
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.kernels.native_library import library, why_absent
from twostroke.kernels.native_matrix import NativeMatrix, NativePair
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.save import save_model
from twostroke.quantization.convert import quantize_model
from twostroke.scheduling.sampling_params import SamplingParams

needs_library = pytest.mark.skipif(library() is None, reason=why_absent())
WEIGHTS = ("fp32", "bf16", "int8", "int8_weight_only", "int4")


def engine(directory: Path, **changes: Any) -> EngineCore:
    return EngineCore(directory, EngineSettings(**{"n_threads": 1, "max_running": 4, "kv_cache_bytes": 2**20} | changes))


def packed(matrix: Any) -> int:
    """Bytes that the library holds of a matrix, or a pair of them, and of its bias."""
    if isinstance(matrix, NativePair):
        return packed(matrix.gate) + packed(matrix.up)
    assert isinstance(matrix, NativeMatrix)
    return matrix.packed_bytes + (0 if matrix.bias is None else 4 * matrix.n_rows)


def slot_bytes(pool: KVPool | TiledKVPool) -> float:
    """Bytes that the pool really holds of one token, scales included."""
    if isinstance(pool, KVPool):
        return pool.storage.nbytes / (pool.n_pages * pool.page_tokens)
    arrays = (pool.keys, pool.values, pool.key_scales, pool.value_scales)
    return sum(array.nbytes for array in arrays) / pool.n_slots


def decode(core: EngineCore, prompts: list[list[int]], n_tokens: int) -> None:
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), prompt, SamplingParams(max_tokens=n_tokens, ignore_eos=True, temperature=0.0))
    while core.has_work:
        core.step()


@needs_library
@pytest.mark.parametrize("kv", CACHE_TYPES)
@pytest.mark.parametrize("head", ["auto", "int8"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_step_reads_what_was_packed_and_the_cache_it_attends_to(tmp_path: Path, weights: str, head: str, kv: str) -> None:
    core = engine(saved("llama", tmp_path / "m")[1], dtype=weights, head_dtype=head, kv_dtype=kv)
    matrices = [op.matrix for op in core.plan.ops if isinstance(op, p.Product)]
    norms = sum(4 * op.weight.numel() for op in core.plan.ops if isinstance(op, p.Norm))  # fp32 in a native step
    decode(core, [list(range(5, 15)), list(range(40, 43))], 6)
    rates = achieved(core, hardware=machine())
    # after n tokens of a prompt, step i attends to n + i keys of each
    keys = sum(10 + i + 3 + i for i in range(1, 6))
    assert rates.decode.steps == 5
    assert rates.decode.read_bytes == 5 * (sum(map(packed, matrices)) + norms) + keys * slot_bytes(core.pool)
    assert rates.prefill.read_bytes == rates.prefill.steps * (sum(map(packed, matrices)) + norms) + 13 * slot_bytes(core.pool)


@needs_library
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_group_of_four_bit_weights_is_in_the_bytes(tmp_path: Path, group: int) -> None:
    decoder = Decoder(small_llama(vocab_size=128))  # wider than a group, so that a row has several
    initialise(decoder, 0)
    source = save_model(decoder, decoder.spec, tmp_path / "m", "bf16")
    quantize_model(source, tmp_path / "q", f"int4-g{group}")
    core = engine(tmp_path / "q")
    matrices = [op.matrix for op in core.plan.ops if isinstance(op, p.BlockProduct)]
    assert product_of(core) == f"native_int4_g{group}"
    other = engine(source, dtype="int4")  # group 64
    assert (core.plan.step_bytes == other.plan.step_bytes) == (group == 64)
    assert sum(m.n_bytes for m in matrices) == sum(map(packed, matrices))


def test_without_native_code_the_same_is_counted_of_torchs_matrices(tmp_path: Path) -> None:
    core = engine(saved("llama", tmp_path / "m")[1], dtype="fp32", runner="torch")
    assert product_of(core) == "fp32"
    decode(core, [[5, 6, 7]], 3)
    spec, rates = core.spec, achieved(core, hardware=machine())
    parameters = sum(tensor.numel() for tensor in saved("llama", tmp_path / "again")[0].parameters())
    assert core.plan.step_bytes == 4 * (parameters - (0 if spec.tied_embeddings else spec.vocab_size * spec.d_model))
    assert rates.decode.read_bytes == 2 * core.plan.step_bytes + (4 + 5) * slot_bytes(core.pool)


def test_shares_are_of_the_measured_rates_at_the_working_set(tmp_path: Path) -> None:
    core = engine(saved("llama", tmp_path / "m")[1], dtype="fp32", runner="torch")
    decode(core, [[5, 6, 7]], 3)
    before = core.stats()
    decode(core, [[8, 9, 10, 11]], 4)
    hardware = machine()
    rates = achieved(core, before, hardware)
    assert (rates.prefill.steps, rates.prefill.tokens, rates.decode.steps) == (1, 4, 3)
    assert rates.decode.read_limit_bytes_per_s == hardware.bandwidth(rates.decode.bytes_per_step)
    assert rates.decode.read_share == pytest.approx(
        rates.decode.read_bytes / rates.decode.seconds / hardware.bandwidth(rates.decode.read_bytes / 3)
    )
    assert rates.prefill.flop_share == pytest.approx(rates.prefill.flop_per_s / hardware.peak_flop_per_s["fp32"])
    assert set(rates.values()) == {
        f"{phase}_{name}"
        for phase in ("prefill", "decode")
        for name in ("bytes_per_s", "flop_per_s", "read_share", "flop_share")
    }


def test_without_a_profile_there_are_rates_and_no_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    core = engine(saved("llama", tmp_path / "m")[1], dtype="fp32", runner="torch")
    decode(core, [[5, 6, 7]], 3)
    rates = achieved(core)
    assert rates.decode.bytes_per_s > 0
    assert (rates.decode.read_share, rates.decode.flop_share) == (None, None)


def test_nothing_run_is_nothing_achieved() -> None:
    nothing = Achieved(PhaseRates(0, 0, 0.0, 0, 0), PhaseRates(0, 0, 0.0, 0, 0), "bf16")
    assert nothing.values() == {}
    assert nothing.decode.bytes_per_step == nothing.decode.tok_per_s == 0


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 200))
def test_windowed_pairs_are_those_that_a_mask_leaves(start: int, count: int, window: int) -> None:
    spec = small_llama(n_layers=1, sliding_window=window, sliding_window_layers=(0,), max_positions=1024)
    query = torch.arange(start, start + count)[:, None]
    key = torch.arange(start + count)[None]
    visible = int(((key <= query) & (key > query - window)).sum())
    meter = StepMeter(spec, 0, 1000)
    assert meter.flop([start], [count], 0) - meter.flop([0], [1], 0) + meter.row_flop + meter.attention_flop == (
        count * meter.row_flop + visible * meter.attention_flop
    )


def test_every_family_is_metered(tmp_path: Path) -> None:
    for name in SPECS:
        core = engine(saved(name, tmp_path / name)[1], dtype="fp32")
        decode(core, [[5, 6, 7]], 2)
        rates = achieved(core, hardware=machine())
        assert rates.decode.read_bytes > core.plan.step_bytes
        assert rates.decode.flop > 0
