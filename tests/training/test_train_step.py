from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from small_models import FEATURES
from twostroke.core import policy
from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.data.loader import Batch
from twostroke.kernels import training_attention
from twostroke.model.decoder import Decoder
from twostroke.training import parallelize
from twostroke.training import step as step_module
from twostroke.training.clock import StepClock
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.step import TrainStep

SPEC = ModelSpec("qwen3", 50, 2, 32, 4, 2, 8, 48, 64, qk_norm=True, tied_embeddings=True)


def _batch(rows: int, length: int, n_ignored: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, SPEC.vocab_size, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets.flatten()[:n_ignored] = -100
    cut = length // 3  # two documents a row
    documents = (torch.arange(length) >= cut).int().expand(rows, length)
    positions = (torch.arange(length) - cut * (torch.arange(length) >= cut)).expand(rows, length)
    return Batch(tokens[:, :-1], targets, positions, documents, n_valid=rows * length - n_ignored)


def _join(batches: list[Batch]) -> Batch:
    fields = [torch.cat([getattr(b, f.name) for b in batches]) for f in dataclasses.fields(Batch) if f.name != "n_valid"]
    return Batch(*fields, n_valid=sum(b.n_valid for b in batches))


class _Setup:
    """A step with everything it works on."""

    def __init__(self, dtype: torch.dtype = torch.float32, clip_norm: float = 1e9, compile: bool = False) -> None:
        self.lines: list[str] = []
        decoder = Decoder(SPEC).train()
        self.masters = MasterWeights(decoder, dtype)
        settings = TrainSettings(steps=10, optimizer="muon")
        self.optimizers = Optimizers(self.masters, SPEC, settings)
        self.step = TrainStep(decoder, self.masters, self.optimizers, clip_norm, compile, self.lines.append)
        self.clock = StepClock(torch.device("cpu"))

    def run(self, batches: list[Batch]) -> step_module.StepResult:
        return self.step(batches, 1.0, self.clock)

    def copy_of_state(self) -> list[Tensor]:
        tensors = [*self.masters.weights.values(), *self.optimizers.state().values(), *self.step.decoder.parameters()]
        return [t.detach().clone() for t in tensors]


def test_accumulated_gradients_are_those_of_one_large_batch() -> None:
    parts = [_batch(2, 24, 0, 1), _batch(2, 24, 41, 2), _batch(2, 24, 7, 3)]  # few valid tokens in the second
    one, many = _Setup(), _Setup()
    whole, split = one.run([_join(parts)]), many.run(parts)
    assert split.n_valid == whole.n_valid == 144 - 48
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    for name, gradient in one.masters.gradients.items():
        # the same fp32 sums in another order; a mean of three means would be off by a third
        torch.testing.assert_close(many.masters.gradients[name], gradient, rtol=1e-4, atol=1e-7)


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """‖found − expected‖ / ‖expected‖ over all gradients."""
    apart = sum((found[name].double() - g.double()).square().sum() for name, g in expected.items())
    return float((apart / sum(g.double().square().sum() for g in expected.values())) ** 0.5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("fp32", 1e-5),  # sums in another order
        ("fp16", 2e-3),  # each micro-batch's gradient is rounded once, to 2⁻¹¹; then they are added in fp32
        ("bf16", 1.5e-2),  # the same with 2⁻⁸
        ("pure_bf16", 2e-2),  # and the sums are rounded too
    ],
)
def test_accumulated_gradients_are_those_of_one_large_batch_in_every_precision(dtype: str, tolerance: float) -> None:
    parts = [_batch(2, 24, 0, 1), _batch(2, 24, 41, 2), _batch(2, 24, 7, 3)]
    found = []
    for batches in ([_join(parts)], parts):
        decoder = Decoder(SPEC).train()
        masters = MasterWeights.of(decoder, dtype)
        optimizers = Optimizers(masters, SPEC, TrainSettings(steps=1, dtype=dtype))  # type: ignore[arg-type]
        step = TrainStep(decoder, masters, optimizers, 1e9, False, print)
        result = step(batches, 0.0, StepClock(torch.device("cpu")))
        kept = {name: gradient.clone() for name, gradient in masters.gradients.items()}
        found.append((result, kept))
    (whole, expected), (split, accumulated) = found
    assert split.loss == pytest.approx(whole.loss, rel=tolerance)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=tolerance)
    assert _distance(accumulated, expected) < tolerance
    # a mean of the micro-batches' means, the mistake that this is about, is far outside
    means: dict[str, Tensor] = {name: torch.zeros_like(g, dtype=torch.float64) for name, g in expected.items()}
    for part in parts:
        setup = _Setup()
        setup.run([part])
        for name, gradient in setup.masters.gradients.items():
            means[name] += gradient / 3
    assert _distance(means, expected) > 5 * tolerance


def test_loss_and_gradient_are_those_of_plain_cross_entropy() -> None:
    setup = _Setup()
    batch = _batch(2, 24, 5, 1)
    reference = Decoder(SPEC)
    logits = reference(batch.tokens, batch.positions, batch.documents)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    result = setup.run([batch])
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(setup.masters.gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_the_gradient_of_one_document_knows_nothing_of_its_neighbour() -> None:
    batch = _batch(1, 24, 0, 1)
    targets = batch.targets.clone()
    targets[:, :8] = -100  # only the second document is learned from
    other_tokens = batch.tokens.clone()
    other_tokens[:, :8] = (other_tokens[:, :8] + 7) % SPEC.vocab_size
    gradients = []
    for tokens in (batch.tokens, other_tokens):
        setup = _Setup()
        setup.run([dataclasses.replace(batch, tokens=tokens, targets=targets, n_valid=16)])
        gradients.append(setup.masters.gradients)
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported() -> None:
    free, clipped = _Setup(), _Setup(clip_norm=0.01)
    batch = _batch(2, 24, 0, 1)
    before, after = free.run([batch]), clipped.run([batch])
    assert before.grad_norm == after.grad_norm > 0.01
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in clipped.masters.gradients.values()]))
    assert norm.item() == pytest.approx(0.01, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_not_finite_changes_nothing(dtype: torch.dtype) -> None:
    setup = _Setup(dtype)
    setup.run([_batch(2, 24, 0, 1)])
    weight = setup.masters.weights["blocks.1.mlp.down.weight"]
    kept = weight[0, 0].item()
    weight[0, 0] = float("nan")
    setup.masters.update_working_copy()
    before = setup.copy_of_state()
    result = setup.run([_batch(2, 24, 0, 2)])
    assert result.skipped == "loss is nan"
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, setup.copy_of_state(), strict=True))
    weight[0, 0] = kept
    setup.masters.update_working_copy()
    assert setup.run([_batch(2, 24, 0, 3)]).skipped is None


def test_a_gradient_that_is_not_finite_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = _Setup()
    setup.run([_batch(2, 24, 0, 1)])
    before = setup.copy_of_state()
    accumulate = setup.masters.accumulate

    def accumulate_infinity() -> None:
        accumulate()
        setup.masters.gradients["final_norm.weight"][3] = float("inf")

    monkeypatch.setattr(setup.masters, "accumulate", accumulate_infinity)
    assert setup.run([_batch(2, 24, 0, 2)]).skipped == "gradient norm is inf"
    assert all(torch.equal(a, b) for a, b in zip(before, setup.copy_of_state(), strict=True))


def test_a_refused_step_changes_nothing_and_says_why() -> None:
    setup = _Setup()
    setup.run([_batch(2, 24, 0, 1)])
    before = setup.copy_of_state()
    asked: list[tuple[float, float]] = []

    def refuse(loss: float, grad_norm: float) -> str:
        asked.append((loss, grad_norm))
        return "gradient norm is far above the others"

    result = setup.step([_batch(2, 24, 0, 2)], 1.0, setup.clock, refuse)
    assert result.skipped == "gradient norm is far above the others"
    assert asked == [(result.loss, result.grad_norm)]
    assert all(torch.equal(a, b) for a, b in zip(before, setup.copy_of_state(), strict=True))
    assert setup.step([_batch(2, 24, 0, 2)], 1.0, setup.clock, lambda loss, norm: None).skipped is None


def test_gradient_norms_of_the_parts_are_those_of_their_gradients() -> None:
    setup = _Setup()
    result = setup.run([_batch(2, 24, 0, 1)])
    assert list(result.block_grad_norms) == ["embed", "blocks.0", "blocks.1", "final_norm"]
    of_block = [g.double().flatten() for name, g in setup.masters.gradients.items() if name.startswith("blocks.1.")]
    # the gradients are as they were: nothing was clipped
    assert result.block_grad_norms["blocks.1"] == pytest.approx(torch.cat(of_block).norm().item(), rel=1e-6)
    assert sum(n**2 for n in result.block_grad_norms.values()) ** 0.5 == pytest.approx(result.grad_norm, rel=1e-6)


def test_parts_of_the_step_are_timed_and_add_up_to_it() -> None:
    setup = _Setup()
    setup.clock.start()
    setup.run([_batch(2, 24, 0, 1), _batch(2, 24, 0, 2)])
    total, parts = setup.clock.finish()
    assert set(parts) == {"forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in parts.values())
    # between the last lap and finish() nothing is done: a millisecond is a scheduler's whim
    assert sum(parts.values()) == pytest.approx(total, abs=1e-3)


def test_activations_are_counted_once_and_without_parameters() -> None:
    setup = _Setup()
    small, large = (setup.step.activations_bytes(_batch(rows, 24, 0, 1)) for rows in (2, 8))
    hidden_bytes = 8 * 24 * SPEC.d_model * 4
    assert large > 10 * hidden_bytes  # each of two blocks keeps at least its two inputs, q, k, v, the mixed values and 2F
    assert large < 4.2 * small
    setup.run([_batch(2, 24, 0, 1)])  # the count left the model as it was


def test_without_a_compiler_it_says_so_once_and_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    setup = _Setup(compile=True)
    plain = _Setup()
    batch = _batch(2, 24, 0, 1)
    assert setup.run([batch]).loss == plain.run([batch]).loss
    assert not setup.step.is_compiled
    assert len(setup.lines) == 1
    assert "no C++ compiler" in setup.lines[0]


def test_a_failed_compilation_is_logged_once_and_the_step_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(decoder: Decoder, chunk: object) -> object:
        for block in decoder.blocks:
            block._compiled_call_impl = _raise
        return _raise

    def _raise(*args: object, **kwargs: object) -> None:
        raise RuntimeError("C++ compile error\nwith a page of details")

    monkeypatch.setattr(step_module, "compile_blocks", broken)
    monkeypatch.setattr(step_module, "why_not_compile", lambda device: None)
    setup, plain = _Setup(torch.bfloat16, compile=True), _Setup(torch.bfloat16)
    for seed in range(2):
        batches = [_batch(2, 24, 0, seed), _batch(2, 24, 3, seed + 9)]
        assert setup.run(batches) == plain.run(batches)
    assert len(setup.lines) == 1
    assert "torch.compile failed (C++ compile error)" in setup.lines[0]
    assert "page of details" not in setup.lines[0]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch: deprecations, and .grad of tensors it looks at
@pytest.mark.skipif(parallelize.why_not_compile(torch.device("cpu")) is not None, reason="no C++ compiler here")
def test_compiled_steps_are_the_uncompiled_ones_and_share_one_graph() -> None:
    torch._dynamo.reset()
    compiled, plain = _Setup(torch.bfloat16, compile=True), _Setup(torch.bfloat16)
    counters = torch._dynamo.utils.counters["stats"]
    graphs = []
    for seed in range(3):
        batch = _batch(2, 32, 3, seed)
        found, wanted = compiled.run([batch]), plain.run([batch])
        # a compiler keeps fp32 between bf16 operations that eager code rounds: a few units of 2⁻⁸
        assert found.loss == pytest.approx(wanted.loss, rel=2e-2)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=5e-2)
        graphs.append(counters["unique_graphs"])
    assert compiled.step.is_compiled, compiled.lines
    assert graphs == [graphs[0]] * 3  # two blocks, three batches: nothing was compiled after the first step
    assert compiled.step.activations_bytes(batch) > 0
    with parallelize.eager(compiled.step.decoder):
        compiled.step.decoder.eval()(torch.zeros(1, 5, dtype=torch.long))
        compiled.step.decoder.train()
    for documents in (torch.zeros(2, 32), torch.arange(32).expand(2, 32), (torch.arange(32) % 7 == 0).cumsum(0).expand(2, 32)):
        compiled.run([dataclasses.replace(batch, documents=documents.int())])  # any layout of documents, after other shapes too
    assert counters["unique_graphs"] == graphs[0]
    torch._dynamo.reset()


def test_threads_are_the_cores_there_are_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert parallelize.use_available_cores() == len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert parallelize.use_available_cores() == 1


def test_a_large_micro_batch_is_computed_in_parts_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _batch(8, 24, 0, 1)
    gradients, kept = [], []
    for tokens in (10_000, 48):  # all rows at once, two at once
        monkeypatch.setattr(policy, "TOKENS_AT_ONCE", tokens)
        setup = _Setup()
        setup.run([batch])
        gradients.append({name: g.clone() for name, g in setup.masters.gradients.items()})
        kept.append(setup.step.activations_bytes(batch))
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-7, msg=name)  # fp32 sums in another order
    assert kept[1] < 0.5 * kept[0]


@pytest.mark.skipif(not training_attention.is_available(), reason="no native attention here")
@pytest.mark.parametrize("compiled", [False, True], ids=("eager", "compiled"))
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
def test_a_step_under_a_bound_or_beside_sinks_is_no_further_from_fp32_by_the_native_attention(
    family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, documents, grouped heads. Explicit attention in bf16 is the yardstick; a wrong term would be far outside."""
    spec = FEATURES[family].with_(n_heads=4, n_kv_heads=2, head_dim=32)
    if spec.moe is None:  # a bound that bends the small scores of new weights; sharper attention is no test in bf16
        spec = spec.with_(departures=dataclasses.replace(spec.departures, attention_cap=0.05))
    else:  # all experts, so that no rounding chooses others
        spec = spec.with_(moe=dataclasses.replace(spec.moe, top_k=spec.moe.n_experts))
    batches, called, attend = [_batch(2, 100, 7, 1)], [], training_attention.packed_attention
    monkeypatch.setattr(training_attention, "packed_attention", lambda *args: (called.append(args), attend(*args))[1])

    def step(dtype: str, natively: bool) -> tuple[step_module.StepResult, dict[str, Tensor]]:
        monkeypatch.setattr(training_attention, "is_available", lambda: natively)
        decoder = Decoder(spec).train()
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if name.endswith(".sinks"):
                    parameter.copy_(torch.linspace(-1, 2, len(parameter)))
        masters = MasterWeights.of(decoder, dtype)
        optimizers = Optimizers(masters, spec, TrainSettings(steps=1, dtype=dtype))  # type: ignore[arg-type]
        result = TrainStep(decoder, masters, optimizers, 1e9, compiled and natively, print)(
            batches, 0.0, StepClock(torch.device("cpu"))
        )
        return result, {name: gradient.clone() for name, gradient in masters.gradients.items()}

    exact, expected = step("fp32", False)
    explicit, by_explicit = step("bf16", False)
    assert not called
    native, by_native = step("bf16", True)
    assert called or compiled
    assert native.loss == pytest.approx(exact.loss, abs=1.5 * abs(explicit.loss - exact.loss) + 2e-3)
    assert _distance(by_native, expected) < 1.2 * _distance(by_explicit, expected)
    for part in ("qkv.weight", "sinks"):
        of_part = {name: gradient for name, gradient in expected.items() if name.endswith(part)}
        if of_part:
            assert _distance(by_native, of_part) < 1.2 * _distance(by_explicit, of_part) + 5e-3
            assert _distance(by_native, of_part) < 0.1
