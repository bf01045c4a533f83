"""The choice of experts, and the losses that keep them evenly chosen, against their formulae."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from small_models import EVERY, decoder_of
from twostroke.core.spec import MoeSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.model.experts import ExpertsMlp, choose_experts
from twostroke.training.experts import ExpertBalance, correction_biases


def test_groups_leave_out_the_experts_of_all_but_the_best() -> None:
    """Two of four groups: by the largest score, and with a correction by the sum of the two largest."""
    moe = MoeSpec(8, 2, 16, n_groups=4, top_groups=2, scores="sigmoid")
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6, 0.7, 0.2, 0.3, 0.3]])
    shares, chosen = choose_experts(moe, torch.logit(scores))
    assert set(chosen[0].tolist()) == {0, 4}
    torch.testing.assert_close(shares.sum(), torch.tensor(1.0))
    correction = torch.zeros(8)
    correction[3] = 0.2  # sums are 1.0, 1.4, 0.9 and 0.6
    shares, chosen = choose_experts(moe, torch.logit(scores), correction)
    assert set(chosen[0].tolist()) == {0, 3}
    torch.testing.assert_close(shares.sort().values, torch.tensor([[0.6 / 1.5, 0.9 / 1.5]]))  # the correction is in no share


@pytest.mark.parametrize("by_two", [False, True])
def test_groups_are_those_that_sorting_finds(by_two: bool) -> None:
    moe = MoeSpec(256, 8, 16, n_groups=8, top_groups=4, scores="sigmoid")
    logits = torch.randn(100, 256, generator=torch.Generator().manual_seed(1))
    correction = torch.linspace(-0.1, 0.1, 256) if by_two else None
    scores = torch.sigmoid(logits) + (0.0 if correction is None else correction)
    best = scores.unflatten(1, (8, 32)).topk(2 if by_two else 1, dim=-1).values.sum(-1)
    in_best = torch.zeros(100, 8).scatter(1, best.topk(4, dim=-1).indices, 1.0).repeat_interleave(32, dim=1)
    expected = torch.where(in_best > 0, scores, float("-inf")).topk(8, dim=-1).indices
    torch.testing.assert_close(choose_experts(moe, logits, correction)[1], expected)


def test_of_equal_groups_the_first_are_better() -> None:
    moe = MoeSpec(8, 2, 16, n_groups=4, top_groups=1, scores="sigmoid")
    assert set(choose_experts(moe, torch.zeros(1, 8))[1][0].tolist()) == {0, 1}
    assert set(choose_experts(moe, torch.zeros(1, 8), torch.tensor([0.0, 0.0, 0.1, 0.1] * 2))[1][0].tolist()) == {2, 3}


@pytest.mark.parametrize("normalised", [False, True])
def test_shares_are_scaled_probabilities(normalised: bool) -> None:
    moe = MoeSpec(6, 3, 16, normalised=normalised, share_scale=2.5)
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    shares, chosen = choose_experts(moe, logits)
    best = torch.softmax(logits, dim=-1).topk(3).values
    expected = 2.5 * (best / best.sum(-1, keepdim=True) if normalised else best)
    torch.testing.assert_close(shares.sort(descending=True).values, expected)
    assert all(len(set(row)) == 3 for row in chosen.tolist())


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_the_losses_of_the_router_reach_its_gradient(family: str) -> None:
    """The gradient with both losses less that without is the gradient of the two formulae, times rows and scale."""
    spec = EVERY[family]
    layer = next(i for i in range(spec.n_layers) if spec.has_experts(i))
    mlp = decoder_of(family).train().blocks[layer].mlp
    assert isinstance(mlp, ExpertsMlp)
    mlp.double()  # a small difference of large gradients
    x = torch.randn(2, 9, spec.d_model, generator=torch.Generator().manual_seed(0)).double()
    mlp.loss_scale.fill_(0.25)
    gradients = []
    for mlp.balance_weight, mlp.z_weight in ((0.0, 0.0), (0.3, 0.07)):
        gradients.append(torch.autograd.grad(mlp(x).square().sum(), mlp.router.weight)[0])
    logits = mlp.router(x.flatten(0, 1))
    chosen = choose_experts(mlp.moe, logits, mlp.correction_bias)[1]
    share = torch.bincount(chosen.flatten(), minlength=mlp.moe.n_experts) / chosen.numel()
    balance = mlp.moe.n_experts * (share * torch.softmax(logits, -1).mean(0)).sum()
    extra = 0.3 * balance + 0.07 * logits.logsumexp(-1).square().mean()
    expected = torch.autograd.grad(0.25 * 18 * extra, mlp.router.weight)[0]
    torch.testing.assert_close(gradients[1] - gradients[0], expected, rtol=1e-4, atol=1e-5)


def test_a_bias_moves_against_the_load() -> None:
    decoder = decoder_of("glm4_moe").train()
    balance = ExpertBalance(decoder, TrainSettings(balance_bias_rate=0.01), moves_biases=True)
    before = {name: bias.clone() for name, bias in correction_biases(decoder).items()}
    assert sorted(before) == ["blocks.1.mlp.correction_bias", "blocks.2.mlp.correction_bias"]
    balance.begin_window()
    decoder(torch.arange(60).view(2, 30)).sum().backward()
    load = balance.mixtures[0].load.clone()
    assert load.sum() == 60 * 3
    worst = balance.update()
    assert worst is not None
    assert worst >= float(load.max() / load.mean())
    moved = correction_biases(decoder)["blocks.1.mlp.correction_bias"] - before["blocks.1.mlp.correction_bias"]
    torch.testing.assert_close(moved, 0.01 * torch.sign(load.mean() - load), rtol=1e-4, atol=1e-6)


def test_losses_and_counts_are_of_training_alone() -> None:
    decoder = decoder_of("mixtral").eval()
    balance = ExpertBalance(decoder, TrainSettings(), moves_biases=True)
    balance.begin_window()
    decoder(torch.arange(20)[None])
    assert all(not mlp.load.any() for mlp in balance.mixtures)
    assert ExpertBalance(decoder_of("llama"), TrainSettings(), moves_biases=True).update() is None


def test_a_group_must_hold_the_chosen_experts() -> None:
    from twostroke.core.errors import ConfigError

    for changes, sentence in (
        ({"n_groups": 3}, "n_groups=3 must divide n_experts=8"),
        ({"n_groups": 4, "top_groups": 1, "top_k": 3}, "top_groups=1 must hold top_k=3"),
        ({"n_groups": 8, "top_groups": 4, "correction_bias": True}, "n_groups=8 leaves one expert in a group"),
        ({"share_scale": 0.0}, "share_scale=0.0 must be positive"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            replace(MoeSpec(8, 2, 16), **changes)  # type: ignore[arg-type]
