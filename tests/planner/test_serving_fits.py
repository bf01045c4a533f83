"""A server that does not fit is told what would, and what is proposed does fit."""

from __future__ import annotations

import re

import pytest

from machines import small_llama
from twostroke.core.errors import CapacityError
from twostroke.core.families import named_model
from twostroke.planner.choosing.serving_fits import fitting_plan, would_fit
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import plan_serving
from twostroke.planner.serving.shape import ServingShape

OPTIONS = {"--tp": "tensor", "--pp": "pipeline", "--scheme": "scheme", "--prompt": "prompt_tokens"}


@pytest.mark.parametrize(
    ("name", "device", "kinds"),
    [
        ("meta-llama/Llama-3.1-70B", "h100", ["--tp", "--scheme"]),
        ("meta-llama/Llama-3.1-405B", "h100", ["--tp"]),
        ("meta-llama/Llama-3.1-8B", "rtx-3070", ["--tp", "--scheme"]),
    ],
)
def test_each_proposal_fits(name: str, device: str, kinds: list[str]) -> None:
    spec, hardware, shape = named_model(name).spec, load_hardware(device), ServingShape()
    proposals = would_fit(spec, shape, hardware)
    assert [words.split()[0] for words in proposals] == kinds
    for words in proposals:
        values = dict(re.findall(r"(--\w+) (\S+)", words))
        fields = {OPTIONS[option]: int(value) if value.isdigit() else value for option, value in values.items()}
        assert plan_serving(spec, ServingShape(**fields), hardware).largest_batch >= 1  # type: ignore[arg-type]


def test_a_long_prompt_is_told_the_length_that_fits() -> None:
    shape = ServingShape(prompt_tokens=120_000, output_tokens=128)
    spec = named_model("meta-llama/Llama-3.1-8B").spec
    with pytest.raises(CapacityError, match=r"Would fit: .*--prompt"):
        fitting_plan(spec, shape, load_hardware("rtx-4090"))


def test_what_fits_is_planned_as_it_is() -> None:
    spec, hardware = small_llama(), load_hardware("h100")
    assert (
        fitting_plan(spec, ServingShape(), hardware).prediction() == plan_serving(spec, ServingShape(), hardware).prediction()
    )
