from __future__ import annotations

import pytest

from twostroke.core.described import plain
from twostroke.core.errors import ConfigError
from twostroke.core.optimizers import OPTIMIZERS
from twostroke.core.recipe import TrainRecipe, recipe_from_dict


def _recipe(method: str = "pretrain", **train: object) -> TrainRecipe:
    model = {"init_from": "base"} if method != "pretrain" else {"n_layers": 1, "d_model": 8, "n_heads": 1, "d_ff": 8}
    return recipe_from_dict({"method": method, "model": model, "train": {"steps": 5} | train})


@pytest.mark.parametrize(
    ("method", "optimizer", "rate"),
    [
        ("pretrain", "adamw", 4e-3),
        ("full", "adamw", 2e-5),
        ("lora", "adamw", 2e-4),
        ("qlora", "muon", 2e-4),
        ("full", "sgd", 5e-3),
    ],
)
def test_the_default_rate_is_that_of_the_method_and_is_written_down(method: str, optimizer: str, rate: float) -> None:
    recipe = _recipe(method, optimizer=optimizer)
    assert recipe.train.learning_rate == rate
    assert plain(recipe)["train"]["learning_rate"] == rate
    assert recipe_from_dict(plain(recipe)) == recipe  # as a resume reads it


def test_a_given_rate_is_kept() -> None:
    assert _recipe("full", learning_rate=1e-4).train.learning_rate == 1e-4
    assert _recipe("pretrain", optimizer="muon").train.muon_learning_rate == 0.02


def test_every_method_and_optimizer_has_a_rate() -> None:
    for row in OPTIMIZERS.values():
        assert set(row.rates) == {"pretrain", "full", "lora"}
        assert row.rates["full"] == min(row.rates.values()), "fine-tuning all weights moves them least"


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"dtype": "bf32"}, "'bf16', 'fp32', 'fp16', 'pure_bf16'"),
        ({"optimizer": "lion"}, "train.optimizer='lion' is not known"),
        ({"activation_checkpointing": "some"}, "'none', 'selective', 'full'"),
        ({"learning_rate": -1.0}, "train.learning_rate=-1.0 must be above 0"),
        ({"learning_rate": float("inf")}, "train.learning_rate=inf must be above 0"),
        ({"ema_decay": 1.0}, "train.ema_decay=1.0 must be at least 0 and less than 1"),
        ({"optimizer": "sgd", "momentum": 1.0}, "train.momentum=1.0"),
        ({"momentum": 0.5}, 'train.momentum=0.5 is read by train.optimizer="sgd" only, and it is "adamw"'),
        ({"optimizer": "muon", "nesterov": True}, 'read by train.optimizer="sgd" only'),
        ({"optimizer": "sgd", "momentum": 0.0, "nesterov": True}, "train.momentum=0 has none"),
        ({"decay_fraction": 0.5}, 'read by train.schedule="wsd" only'),
        ({"schedule": "wsd", "decay_fraction": 0.0}, "train.decay_fraction=0.0 must be above 0"),
        ({"schedule": "wsd", "decay_fraction": 0.8, "warmup_fraction": 0.3}, "together they must be at most 1"),
        ({"weight_decay": -0.1}, "train.weight_decay=-0.1 must be at least 0"),
        ({"weight_decay": float("inf")}, "train.weight_decay=inf"),
        ({"clip_norm": 0.0}, "train.clip_norm=0.0 must be above 0"),
        ({"decay_norms": 1}, "train.decay_norms=1 must be of type bool"),
    ],
)
def test_a_value_that_cannot_be_meant_is_answered_when_the_recipe_is_read(train: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _recipe(**train)
    assert words in str(raised.value)
