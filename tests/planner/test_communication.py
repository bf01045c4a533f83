"""Traffic of a step: volumes from the papers, bursts, overlap, the pipeline's bubble, accumulation that is not forgotten."""

from __future__ import annotations

import pytest

from machines import small_llama
from twostroke.core.described import plain
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.training.communication import Traffic
from twostroke.planner.training.layout import Layout, group_link
from twostroke.planner.training.plan import TrainingPlan, plan_training
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.params import count_parameters

SPEC = small_llama()
N = count_parameters(SPEC).total
OUTSIDE = count_parameters(SPEC).embedding + count_parameters(SPEC).head + count_parameters(SPEC).final_norm


def h100() -> Hardware:
    return load_hardware("h100")


def plan(layout: Layout, spec: ModelSpec = SPEC, **changes: object) -> TrainingPlan:
    return plan_training(spec, TrainingShape(**changes), h100(), layout)  # type: ignore[arg-type]


def sent(p: TrainingPlan, parallel: str) -> float:
    return sum(t.sent_bytes for t in p.traffic if t.parallel == parallel)


@pytest.mark.parametrize(("zero", "elements"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_data_parallel_volume_is_two_or_three_elements_a_parameter(zero: int, elements: int) -> None:
    """Section 7 of arXiv 1910.02054, in 16 bits and for many ranks; what is no block stays gathered for its backward pass."""
    p = plan(Layout(data=1024, zero=zero), gradient_bits=16)
    kept = OUTSIDE if zero == 3 else 0
    assert sent(p, "data") == pytest.approx(2 * (elements * N - kept) * 1023 / 1024)


def test_fsdp2_reduces_in_fp32_and_any_job_in_as_many_bits_as_asked() -> None:
    sharded, gathered = Layout(data=8, zero=3), 2 * (2 * N - OUTSIDE)
    for layout, bits, whole in ((sharded, 0, gathered + 4 * N), (sharded, 8, gathered + N), (Layout(data=8), 4, N)):
        assert sent(plan(layout, gradient_bits=bits), "data") == pytest.approx(whole * 7 / 8)


def test_accumulation_multiplies_what_is_sent_each_micro_batch_and_nothing_else() -> None:
    """DDP and ZeRO-1 reduce once a step, ZeRO-2 reduces and ZeRO-3 gathers as well every micro-batch; sums are fp32."""
    ranks, passes = 8, 4
    share = (ranks - 1) / ranks
    expected = {0: 8 * N, 1: 6 * N, 2: (passes * 4 + 2) * N, 3: passes * (8 * N - 2 * OUTSIDE)}
    for zero, whole in expected.items():
        p = plan(Layout(data=ranks, zero=zero), grad_accumulation=passes)
        assert sent(p, "data") == pytest.approx(whole * share)


def test_tensor_parallel_reduces_four_times_a_layer_six_with_recomputation_and_at_both_ends() -> None:
    hidden = 2 * 8192 * 256
    for checkpointing, times in (("none", 4 * 6 + 2), ("full", 6 * 6 + 2)):
        p = plan(Layout(tensor=2), checkpointing=checkpointing, grad_accumulation=3)
        traffic, whole = p.traffic
        assert traffic.bursts == 3 * times
        assert traffic.burst_bytes == hidden
        assert traffic.sent_bytes == pytest.approx(3 * times * hidden)  # 2·(t−1)/t = 1 for two ranks
        assert traffic.exposed_s == traffic.seconds
        assert (whole.bursts, whole.sent_bytes) == (1, 4 * (2 * 6 + 1) * 256)  # norms, in fp32, once a step


def test_experts_exchange_their_tokens_four_times_a_layer() -> None:
    """2 all-to-alls each way of s·b·k·E·w·(e−1)/e bytes."""
    spec = small_llama(moe=MoeSpec(n_experts=8, top_k=2, d_expert=352))
    p = plan(Layout(data=4, expert=4), spec)
    assert sent(p, "expert") == pytest.approx(6 * 4 * 8192 * 2 * 256 * 2 * 3 / 4)


def test_pipeline_sends_the_hidden_state_each_way_once_a_chunk() -> None:
    p = plan(Layout(pipeline=3, interleave=2), grad_accumulation=6)
    of_head = 6 * 2 * 4096 * 256  # the gradient of an embedding that is the last stage's head
    assert sent(p, "pipeline") == 6 * 2 * 2 * 2 * 8192 * 256 + of_head


@pytest.mark.parametrize(("pipeline", "interleave", "passes"), [(2, 1, 2), (2, 1, 16), (3, 2, 6), (6, 1, 6)])
def test_the_bubble_is_its_share_of_the_passes(pipeline: int, interleave: int, passes: int) -> None:
    """(p−1)/(v·m) of the passes (arXiv 2104.04473), with a head so small that the last stage is an ordinary one."""
    spec = small_llama(vocab_size=8, d_model=4096, d_ff=16_384, n_heads=32, n_kv_heads=32, head_dim=128)
    p = plan(Layout(pipeline=pipeline, interleave=interleave), spec, grad_accumulation=passes)
    inside = sum(t.exposed_s for t in p.traffic)
    share = p.bubble_s / (p.forward_s + p.backward_s + inside)
    assert share == pytest.approx((pipeline - 1) / (interleave * passes), rel=0.03)


def test_reductions_hide_behind_backward_and_never_wholly() -> None:
    p = plan(Layout(data=8, zero=3), batch_size=64)
    for traffic in p.traffic:
        once = traffic.seconds / traffic.bursts
        assert once <= traffic.exposed_s * (1 + 1e-9)
        assert traffic.exposed_s <= traffic.seconds * (1 + 1e-9)
        assert "one burst" in traffic.overlap
    slow = plan_training(SPEC, TrainingShape(1, 64), h100(), Layout(data=16, zero=3, devices_per_node=1))
    assert slow.communication_s > 0.5 * slow.step_time_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_no_more_is_hidden_than_there_is_work_to_hide_behind(zero: int) -> None:
    """Experts and the rest reduce over different groups and the same link, behind the same passes."""
    spec = small_llama(moe=MoeSpec(n_experts=8, top_k=1, d_expert=704))
    passes = 2
    p = plan(Layout(data=16, expert=4, zero=zero), spec, batch_size=1, sequence_length=128, grad_accumulation=passes)
    groups = {t.n_ranks for t in p.traffic if t.parallel == "data"}
    assert groups == {16, 4}
    hidden = sum(t.seconds - t.exposed_s for t in p.traffic if t.parallel == "data")
    behind = (p.forward_s + p.backward_s) / (1 if zero >= 2 else passes)
    assert hidden <= behind * (1 + 1e-9)


def test_a_group_that_leaves_its_node_uses_all_the_ports_its_members_have() -> None:
    machine = h100()
    assert group_link(Layout(), machine, 8) == machine.link
    spread = group_link(Layout(), machine, 64)  # 8 members a node drive 8 ports
    assert spread.bytes_per_s == min(machine.link.bytes_per_s, 8 * machine.network.bytes_per_s)
    assert group_link(Layout(tensor=8), machine, 8, 8) == machine.network  # one member a node
    assert group_link(Layout(devices_per_node=1), machine, 2) == machine.network


def test_more_devices_take_less_time_for_the_same_batch_and_more_in_all() -> None:
    """Strong scaling: 8 sequences on 1, 2, 4 and 8 devices."""
    spec = small_llama(d_model=1024, d_ff=2816, n_heads=16, head_dim=64, n_kv_heads=16)
    plans = [plan(Layout(data=d, zero=1 if d > 1 else 0), spec, batch_size=8 // d, sequence_length=1024) for d in (1, 2, 4, 8)]
    times = [p.step_time_s for p in plans]
    assert times == sorted(times, reverse=True)
    spent = [p.step_time_s * p.layout.n_devices for p in plans]
    assert spent == sorted(spent)
    assert len({p.tokens_per_step for p in plans}) == 1


def test_the_peak_of_the_computing_type_is_used() -> None:
    """FP32's peak for a bf16 run is a known mistake: it makes MFU 15 times too high on an H100."""
    p = plan(Layout(data=8))
    per_device = p.flops_per_token * p.tok_per_s / 8
    assert p.mfu == pytest.approx(per_device / h100().peak_flop_per_s["bf16"])
    assert plan(Layout(data=8), dtype="fp32").step_time_s > 3 * p.step_time_s
    assert plan(Layout(data=8), dtype="fp16").step_time_s == pytest.approx(p.step_time_s)


def test_traffic_is_plain_data() -> None:
    traffic = plan(Layout(data=2)).traffic[0]
    assert isinstance(traffic, Traffic)
    assert {"parallel", "sent_bytes", "bursts", "burst_bytes", "seconds", "exposed_s", "overlap"} <= set(plain(traffic))
