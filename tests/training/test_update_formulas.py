"""Every optimizer's steps against its formulas written out in float64, with warm-up, decay and decay groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from twostroke.core.spec import ModelSpec
from twostroke.core.train_settings import TrainSettings
from twostroke.model.decoder import Decoder
from twostroke.training.lamb import Lamb
from twostroke.training.optimizers import Optimizers
from twostroke.training.precision import MasterWeights
from twostroke.training.schedules import scheduled_factor

SPEC = ModelSpec("llama", 40, 2, 16, 4, 2, 4, 24, 32)
STEPS = 8
RATE, DECAY, B1, B2, EPS, MOMENTUM = 1e-2, 0.1, 0.9, 0.95, 1e-8, 0.8

Array = np.ndarray
Update = Callable[[Array, Array, dict[str, Array], int, float, float], Array]
"""(w, g, state, t from 1, rate, decay) → new w."""


def _adam_step(w: Array, g: Array, state: dict[str, Array], t: int, rate: float) -> Array:
    m = state["m"] = B1 * state.get("m", 0 * w) + (1 - B1) * g
    v = state["v"] = B2 * state.get("v", 0 * w) + (1 - B2) * g**2
    step: Array = rate * (m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + EPS)
    return step


def adamw(w: Array, g: Array, state: dict[str, Array], t: int, rate: float, decay: float) -> Array:
    """Loshchilov & Hutter 2019, algorithm 2, with the decay times the learning rate."""
    return w - rate * decay * w - _adam_step(w, g, state, t, rate)


def adam(w: Array, g: Array, state: dict[str, Array], t: int, rate: float, decay: float) -> Array:
    """Kingma & Ba 2015 with decay·w in the gradient."""
    return w - _adam_step(w, g + decay * w, state, t, rate)


def sgd(w: Array, g: Array, state: dict[str, Array], t: int, rate: float, decay: float, nesterov: bool = False) -> Array:
    """Sutskever et al. 2013, as torch writes it: the rate multiplies the whole of the velocity."""
    g = g + decay * w
    u = state["u"] = MOMENTUM * state["u"] + g if "u" in state else g
    return w - rate * (g + MOMENTUM * u if nesterov else u)


def sgd_nesterov(w: Array, g: Array, state: dict[str, Array], t: int, rate: float, decay: float) -> Array:
    return sgd(w, g, state, t, rate, decay, nesterov=True)


def muon(w: Array, g: Array, state: dict[str, Array], t: int, rate: float, decay: float) -> Array:
    """Jordan 2024: Nesterov momentum, five Newton-Schulz iterations, the rate times √max(1, rows/columns)."""
    u = state["u"] = 0.95 * state.get("u", 0 * w) + 0.05 * g
    x = 0.05 * g + 0.95 * u
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.T if tall else x
    return w * (1 - rate * decay) - rate * np.sqrt(max(1.0, w.shape[0] / w.shape[1])) * x


def lamb(w: Array, g: Array, state: dict[str, Array], t: int, rate: float, decay: float) -> Array:
    """You et al. 2019, algorithm 2 with φ(x) = x; a vector's ratio is 1."""
    r = _adam_step(w, g, state, t, 1.0) + decay * w
    return w - rate * (np.linalg.norm(w) / np.linalg.norm(r) if w.ndim > 1 else 1.0) * r


def _run(settings: TrainSettings) -> tuple[MasterWeights, dict[str, Array], list[dict[str, Array]]]:
    """The masters after ``STEPS`` steps, where they began in float64, and the gradients."""
    masters = MasterWeights(Decoder(SPEC), torch.float32)
    before = {name: weight.double().numpy().copy() for name, weight in masters.weights.items()}
    optimizers = Optimizers(masters, SPEC, settings)
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for step in range(STEPS):
        for gradient in masters.gradients.values():
            gradient.normal_(generator=generator)
        gradients.append({name: g.double().numpy().copy() for name, g in masters.gradients.items()})
        optimizers.step(scheduled_factor(settings, step, STEPS))
    return masters, before, gradients


def _settings(optimizer: str, **changes: object) -> TrainSettings:
    shared: dict[str, object] = {
        "steps": STEPS,
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "beta1": B1,
        "beta2": B2,
        "eps": EPS,
    }
    shared |= {"warmup_fraction": 0.25, "schedule": "linear", "min_lr_ratio": 0.1}
    return TrainSettings(optimizer=optimizer, **(shared | changes))  # type: ignore[arg-type]


def _factors() -> list[float]:
    """Two steps of warm-up, then a straight line to 0.1, written out."""
    return [0.5, 1.0, *(1 - 0.9 * k / 5 for k in range(6))]


def _decays(name: str, embeddings: bool, norms: bool) -> bool:
    if "norm" in name:
        return norms
    return embeddings if name == "embed.weight" else True


@pytest.mark.parametrize(
    ("optimizer", "changes", "formula"),
    [
        ("adamw", {}, adamw),
        ("adam", {}, adam),
        ("sgd", {"momentum": MOMENTUM}, sgd),
        ("sgd", {"momentum": MOMENTUM, "nesterov": True}, sgd_nesterov),
    ],
    ids=["adamw", "adam", "sgd", "nesterov"],
)
@pytest.mark.parametrize(("embeddings", "norms"), [(False, False), (True, False), (False, True)])
def test_steps_are_those_of_the_formula(
    optimizer: str, changes: dict[str, object], formula: Update, embeddings: bool, norms: bool
) -> None:
    settings = _settings(optimizer, decay_embeddings=embeddings, decay_norms=norms, **changes)
    masters, expected, gradients = _run(settings)
    for name, w in expected.items():
        state: dict[str, Array] = {}
        for t, (gradient, factor) in enumerate(zip(gradients, _factors(), strict=True), 1):
            w = formula(w, gradient[name], state, t, RATE * factor, DECAY if _decays(name, embeddings, norms) else 0.0)
        # eight fp32 updates of about 10⁻² on weights of about 1: a few units of 2⁻²³
        np.testing.assert_allclose(masters.weights[name].numpy(), w, rtol=3e-6, atol=2e-6, err_msg=name)


def test_lamb_takes_each_matrix_of_a_packed_one_by_its_own_length() -> None:
    masters, expected, gradients = _run(_settings("lamb"))
    parts = {"attn.qkv.weight": (16, 8, 8), "mlp.gate_up.weight": (24, 24)}
    for name, w in expected.items():
        cuts = next((np.cumsum(rows)[:-1] for end, rows in parts.items() if name.endswith(end)), [])
        pieces = []
        for number, piece in enumerate(np.split(w, cuts)):
            state: dict[str, Array] = {}
            for t, (gradient, factor) in enumerate(zip(gradients, _factors(), strict=True), 1):
                g = np.split(gradient[name], cuts)[number]
                piece = lamb(piece, g, state, t, RATE * factor, DECAY if _decays(name, False, False) else 0.0)
            pieces.append(piece)
        # as above; lengths are sums over up to 640 numbers
        np.testing.assert_allclose(masters.weights[name].numpy(), np.concatenate(pieces), rtol=1e-5, atol=2e-6, err_msg=name)


def test_a_weight_of_zeros_leaves_zero_under_lamb() -> None:
    """Its length gives no ratio: the paper's 0 would keep it at zero for ever, as the second matrix of a LoRA adapter."""
    weight = torch.zeros(3, 4, requires_grad=True)
    weight.grad = torch.ones(3, 4)
    Lamb([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-8).step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 4), -0.1))


def test_muon_updates_matrices_by_the_formula_and_the_rest_with_adamw() -> None:
    masters, expected, gradients = _run(_settings("muon", muon_learning_rate=0.02))
    parts = {"attn.qkv.weight": (16, 8, 8), "mlp.gate_up.weight": (24, 24)}
    for name, w in expected.items():
        matrix = name.startswith("blocks.") and w.ndim == 2
        cuts = next((np.cumsum(rows)[:-1] for end, rows in parts.items() if name.endswith(end)), [])
        pieces = []
        for number, piece in enumerate(np.split(w, cuts) if matrix else [w]):
            state: dict[str, Array] = {}
            for t, (gradient, factor) in enumerate(zip(gradients, _factors(), strict=True), 1):
                g = np.split(gradient[name], cuts)[number] if matrix else gradient[name]
                if matrix:
                    piece = muon(piece, g, state, t, 0.02 * factor, DECAY)
                else:
                    piece = adamw(piece, g, state, t, RATE * factor, DECAY if _decays(name, False, False) else 0.0)
            pieces.append(piece)
        found, wanted = masters.weights[name].double().numpy(), np.concatenate(pieces)
        # torch iterates in bf16, 2⁻⁹ a product, five times over; what is compared is the change, not the weight
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted - expected[name])
        assert error < (0.03 if matrix else 1e-4), (name, error)


def test_plain_gradient_descent_keeps_no_state() -> None:
    masters = MasterWeights(Decoder(SPEC), torch.float32)
    optimizers = Optimizers(masters, SPEC, _settings("sgd", momentum=0.0, weight_decay=0.0))
    before = masters.weights["embed.weight"].clone()
    masters.gradients["embed.weight"].fill_(1.0)
    optimizers.step(1.0)
    torch.testing.assert_close(masters.weights["embed.weight"], before - RATE)
    assert optimizers.state() == {}
    assert optimizers.state_bytes == 0
    optimizers.load_state({})
