"""What would make a server fit: more devices, fewer bits or a shorter prompt, each found by planning it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.schemes import SEARCHED, scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.serving.plan import ServingPlan, plan_serving, served_schemes
from twostroke.planner.serving.shape import ServingShape

MAX_TENSOR, MAX_STAGES = 8, 16
"""Devices that share matrices on one node, and stages of such nodes, up to which a layout is looked for."""


def fitting_plan(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> ServingPlan:
    """The plan, as ``plan_serving`` makes it. A CapacityError names what would fit."""
    try:
        return plan_serving(spec, shape, hardware)
    except CapacityError as error:
        found = would_fit(spec, shape, hardware)
        raise CapacityError(f"{error} Would fit: {'; or '.join(found)}." if found else str(error)) from None


def would_fit(spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> list[str]:
    """The least change of each kind after which the server fits, as options."""
    kinds = (_more_devices(shape, hardware), _fewer_bits(shape, hardware), _shorter_prompts(shape))
    found = (_first_that_fits(spec, changes, hardware) for changes in kinds)
    return [words for words in found if words]


Changes = Iterable[tuple[str, ServingShape]]


def _first_that_fits(spec: ModelSpec, changes: Changes, hardware: Hardware) -> str:
    for words, changed in changes:
        try:
            plan_serving(spec, changed, hardware)
        except (CapacityError, ConfigError):  # a ConfigError: it does not divide this model
            continue
        return words
    return ""


def _more_devices(shape: ServingShape, hardware: Hardware) -> Iterator[tuple[str, ServingShape]]:
    """Tensor parallel over a node, then stages of whole nodes. Our own engine has one device."""
    if hardware.is_calibrated_cpu or shape.expert > 1:
        return
    tensor = shape.tensor
    while (tensor := 2 * tensor) <= MAX_TENSOR:
        yield f"--tp {tensor}", replace(shape, tensor=tensor)
    pipeline = shape.pipeline
    while (pipeline := 2 * pipeline) <= MAX_STAGES:
        yield f"--tp {MAX_TENSOR} --pp {pipeline}", replace(shape, tensor=MAX_TENSOR, pipeline=pipeline)


def _fewer_bits(shape: ServingShape, hardware: Hardware) -> Iterator[tuple[str, ServingShape]]:
    """Schemes of fewer bytes a weight, the most of them first."""
    known = served_schemes(hardware) if hardware.is_calibrated_cpu else SEARCHED
    smaller = [name for name in known if scheme_of(name).element_bytes < scheme_of(shape.scheme).element_bytes]
    for name in sorted(smaller, key=lambda name: -scheme_of(name).element_bytes):
        yield f"--scheme {name}", replace(shape, scheme=name, in_int8=(), in_bf16=())


def _shorter_prompts(shape: ServingShape) -> Iterator[tuple[str, ServingShape]]:
    prompt = shape.prompt_tokens
    while (prompt := prompt // 2) >= 1:
        yield f"--prompt {prompt}", replace(shape, prompt_tokens=prompt)
