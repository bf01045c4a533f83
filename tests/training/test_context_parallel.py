"""Context parallel: ring attention is attention, runs are close to one rank, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ranked import RankRunner, assert_close_to_one_rank, furthest, laid_out

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.model.attention import attention_mask, explicit_attention
from twostroke.training.start import train

LLAMA = {"family": "llama", "n_layers": 2, "d_model": 36, "n_heads": 4, "n_kv_heads": 2, "d_ff": 52, "head_dim": 16}
GPT2 = {"family": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64}


def _attend(ranks: Any, window: int | None, dtype: torch.dtype) -> Any:
    """(result, gradients) of this rank's pieces of attention over packed rows."""
    from twostroke.data.loader import Batch
    from twostroke.training.context_parallel import Ring, _RingAttention, _Shape

    ranks.lay_out(ParallelRecipe(data=1, context=ranks.n))
    q, k, v, upper, documents = _inputs(dtype)
    ring = Ring(ranks)
    ids = torch.arange(documents.numel()).view_as(documents)
    own = ring.begin(Batch(ids, ids, ids, documents, 0)).tokens[0]
    q, k, v = (t[..., own, :].clone().requires_grad_() for t in (q, k, v))
    out = _RingAttention.apply(q.unflatten(1, (2, -1)), k, v, _Shape(ring, documents, window, 0.25))
    out.flatten(1, 2).backward(upper[..., own, :])
    return own.tolist(), [t.detach().float().tolist() for t in (out.flatten(1, 2), q.grad, k.grad, v.grad)]


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 4, 32, 16), (1, 2, 32, 16), (1, 2, 32, 16), (1, 4, 32, 16))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*drawn, torch.tensor([[0] * 5 + [1] * 19 + [2] * 8])]


@pytest.mark.parametrize(
    ("n", "window", "dtype", "limit"),
    [(2, None, torch.float32, 2e-6), (4, 7, torch.float32, 2e-6), (4, None, torch.bfloat16, 3e-2)],
)
def test_ring_attention_is_attention(runner: RankRunner, n: int, window: int | None, dtype: torch.dtype, limit: float) -> None:
    """Forward and backward, of packed documents that no piece contains, with grouped queries and a window."""
    answers = runner.call(_attend, n, window, dtype)
    q, k, v, upper, documents = _inputs(torch.float32 if dtype == torch.float32 else dtype)
    q, k, v, upper = (t.float() for t in (q, k, v, upper))
    mask = attention_mask(32, window, documents, torch.device("cpu"), torch.float32, explicit=True)
    assert mask is not None
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = explicit_attention(*leaves, mask, 0.0, 0.25)  # type: ignore[arg-type]
    out.backward(upper)
    for number, wanted in enumerate((out.detach(), *(leaf.grad for leaf in leaves))):
        found = torch.zeros_like(wanted)  # type: ignore[arg-type]
        for _, (own, tensors), _ in answers:
            found[..., own, :] = torch.tensor(tensors[number])
        assert wanted is not None
        assert float((found - wanted).abs().max() / wanted.abs().max()) < limit


@pytest.mark.parametrize(
    ("model", "settings", "n", "parallel", "limits"),
    [
        (LLAMA, {"steps": 20, "evaluate_every": 10}, 2, {"context": 2}, (1e-5, 1e-5)),
        (
            GPT2,
            {"steps": 20, "optimizer": "sgd", "activation_checkpointing": "full"},
            4,
            {"context": 2, "data": 2},
            (1e-5, 1e-5),
        ),
        (LLAMA, {"steps": 8, "optimizer": "muon", "ema_decay": 0.9, "clip_norm": 0.1}, 4, {"context": 4}, (1e-4, 2e-2)),
        (LLAMA, {"steps": 8, "dtype": "bf16"}, 2, {"context": 2}, (5e-3, 5e-2)),
    ],
    ids=["llama", "gpt2-data", "muon-4", "bf16"],
)
def test_a_run_on_several_ranks_is_close_to_one(
    make_recipe: Any, runner: RankRunner, model: Any, settings: Any, n: int, parallel: Any, limits: tuple[float, float]
) -> None:
    recipe = make_recipe("run", model, **{"grad_accumulation": 2, "dtype": "fp32", **settings})
    assert_close_to_one_rank(runner, recipe, n, parallel, limits)


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        (
            LLAMA,
            {"sequence_length": 30},
            "context=2 cuts sequences into 4 pieces, which sequence_length=30 is no multiple of. Use 1, 3, 5 or 15, or 28",
        ),
        (LLAMA | {"dropout": 0.1}, {}, "the model has dropout, which parallel.context=2 cannot cut yet."),
    ],
)
def test_what_ranks_cannot_share_is_one_sentence(
    make_recipe: Any, runner: RankRunner, model: Any, settings: Any, sentence: str
) -> None:
    answers = runner.train(2, laid_out(make_recipe("run", model, **settings), "bad", context=2))
    assert [(kind, is_told) for kind, _, is_told in answers] == [("ConfigError", False), ("ConfigError", True)]
    assert sentence in answers[0][1]


def test_another_layout_resumes_a_checkpoint(make_recipe: Any, runner: RankRunner) -> None:
    """Ranks that share sequences are stopped, and ranks that share matrices go on."""
    recipe = make_recipe("run", LLAMA, steps=6, grad_accumulation=2, dtype="fp32")
    whole = laid_out(recipe, "whole")
    train(whole)
    begun = laid_out(recipe, "begun", context=2)
    assert runner.train(2, begun, stop_after=3)[0][0] == "Interrupted"
    again = dataclasses.replace(begun, parallel=ParallelRecipe(tensor=2))
    assert [kind for kind, *_ in runner.train(2, again, resume=True)] == ["done"] * 2
    assert furthest(begun, whole) < (1e-5, 1e-4)
