"""Serving by torch, where there is no native library: the machine's rates with what torch loses of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import ideal_machine, machine, small_llama
from twostroke.core.matrices import block_matrices
from twostroke.core.policy import MAX_PAGES
from twostroke.planner.hardware.tables import ASSUMED_LAUNCH_S
from twostroke.planner.serving.plan import plan_serving, strategy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.torch_runner import READING_SHARE, STEP_OPERATORS, TORCH_OPERATORS, TorchRunner
from twostroke.planner.work.weights import kv_bytes_per_token, matrices_bytes


def test_a_step_reads_at_half_the_rate_and_starts_every_operator() -> None:
    spec, shape = small_llama(), ServingShape(batch=1, prompt_tokens=500, output_tokens=1)
    fast = ideal_machine(peak_flop_per_s={"bf16": 1e21})
    read = matrices_bytes(spec, "bf16") + 2.0 * spec.vocab_size * spec.d_model + 501 * kv_bytes_per_token(spec)
    starts = spec.n_layers * TORCH_OPERATORS + STEP_OPERATORS
    wanted = read / (READING_SHARE * 1e11) + starts * ASSUMED_LAUNCH_S["cpu"]
    assert plan_serving(spec, shape, fast).step_s == pytest.approx(wanted, rel=1e-6)


def test_it_is_our_engine_with_its_limits() -> None:
    spec = small_llama()
    torch_runner = strategy_of(spec, ServingShape(kv_cache_bytes=10**15), machine())
    assert isinstance(torch_runner, TorchRunner)
    assert torch_runner.cache_pages() == MAX_PAGES
    assert not isinstance(strategy_of(spec, ServingShape(tensor=2), machine()), TorchRunner)
    plan = plan_serving(spec, ServingShape(batch=4), machine())
    assert plan.added_by_a_prompt_s == plan.ttft_s  # the same scheduler: a prompt is computed in steps of its own
    assert any("torch" in note for note in plan.notes)


def test_int8_matrices_that_both_kernels_hold_are_counted_twice() -> None:
    spec, shape = small_llama(), ServingShape(scheme="int8")
    one_kernel = machine()  # w8 alone
    both = replace(one_kernel, matmul=(*one_kernel.matmul, replace(one_kernel.matmul[0], scheme="w8a8")))
    twice, once = (strategy_of(spec, shape, hardware).weights_bytes() for hardware in (both, one_kernel))
    assert twice - once == spec.n_layers * sum(matrix.weights for matrix in block_matrices(spec))
