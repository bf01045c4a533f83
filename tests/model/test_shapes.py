"""The shape annotations of the model's tensor functions are true: jaxtyping and beartype check them while a model runs."""

from __future__ import annotations

import inspect

import jaxtyping
import pytest
import torch
from beartype import beartype

from twostroke.core.spec import ModelSpec
from twostroke.model import attention, decoder, mlp, norm, rope

MODULES = (attention, decoder, mlp, norm, rope)


def checked_names(module: object) -> list[tuple[object, str]]:
    """(owner, name) of the module's own functions and ``forward``/``hidden`` methods."""
    names: list[tuple[object, str]] = []
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:  # type: ignore[attr-defined]
            continue
        if inspect.isfunction(value) and not name.startswith("_"):
            names.append((module, name))
        elif inspect.isclass(value):
            names.extend((value, method) for method in ("forward", "hidden") if method in vars(value))
    return names


@pytest.fixture
def shapes_enforced(monkeypatch: pytest.MonkeyPatch) -> int:
    originals = {}
    for module in MODULES:
        for name in ("Float", "Int", "Bool"):
            monkeypatch.setattr(module, name, getattr(jaxtyping, name), raising=False)
    for module in MODULES:
        for owner, name in checked_names(module):
            originals[vars(owner)[name]] = jaxtyping.jaxtyped(vars(owner)[name], typechecker=beartype)
            monkeypatch.setattr(owner, name, originals[vars(owner)[name]])
    for module in MODULES:  # functions that another module imported by name
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in originals:
                monkeypatch.setattr(module, name, originals[value])
    return len(originals)


SPECS = {
    "llama": ModelSpec("llama", 50, 2, 24, 4, 2, 6, 40, 64),
    "qwen3-windowed": ModelSpec("qwen3", 50, 2, 24, 4, 2, 6, 40, 64, qk_norm=True, sliding_window=3),
    "gpt2": ModelSpec("gpt2", 50, 2, 24, 4, 4, 6, 40, 64, norm="layernorm", positions="learned", mlp="gelu", qkv_bias=True),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_annotated_shapes_hold(spec: ModelSpec, dtype: torch.dtype, shapes_enforced: int) -> None:
    assert shapes_enforced >= 15
    model = decoder.Decoder(spec, dtype).train()
    tokens = torch.zeros(2, 9, dtype=torch.long)
    documents = torch.tensor([[0] * 4 + [1] * 5] * 2, dtype=torch.int32)
    assert model(tokens, None, documents).shape == (2, 9, 50)
    assert model(tokens).shape == (2, 9, 50)


def test_the_check_fails_on_a_wrong_shape(shapes_enforced: int) -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        decoder.Decoder(SPECS["llama"])(torch.zeros(9, dtype=torch.long))
