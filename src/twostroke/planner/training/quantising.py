"""Seconds of `twostroke quantize`: reading, rounding and writing weights, and fitting the rounding of groups to text."""

from __future__ import annotations

from twostroke.core.errors import ConfigError
from twostroke.core.matrices import block_matrices
from twostroke.core.named import letter, named
from twostroke.core.schemes import written_scheme
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.training.scoring import decoder_token_s
from twostroke.planner.work.params import count_parameters
from twostroke.planner.work.weights import mixed_weights_bytes

EXPECTED_PASSES = 2.0
"""Times that the model is rounded: once if its loss is small, three times if single matrices go to int8."""


def quantise_s(
    spec: ModelSpec,
    scheme: str,
    hardware: Hardware,
    fitted_tokens: int = 0,
    row_tokens: int = 1,
    compensated: bool = True,
    tried_scales: int = 0,
) -> float:
    """Reading 16 bits a weight, rounding block matrices, writing the result; groups are fitted to ``fitted_tokens``, 0 if every
    weight goes to its nearest code: ``compensated`` column after column, and with so many ``tried_scales`` of each matrix's
    inputs. Raises ConfigError where rounding was not measured."""
    rates, held = hardware.weights, written_scheme(scheme)
    rate = rates.rounded_per_s.get(held.family)
    if rate is None:
        raise ConfigError(f"{hardware.label} has no rate of rounding to {scheme}. Run `twostroke calibrate`.")
    parameters = count_parameters(spec)
    reading = hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s
    moving_s = 2.0 * parameters.total / letter("reading", reading)
    writing_s = mixed_weights_bytes(spec, held.name, ()) / letter("writing", hardware.disk_write_bytes_per_s)
    rounding_s = parameters.block_matrices / letter("rounding", rate)
    if fitted_tokens:
        tries = tried_scales * (rounding_s + _outputs_s(spec, hardware))
        fitting_s = _pass_s(spec, hardware, fitted_tokens, row_tokens) if compensated else rounding_s
        rounding_s = EXPECTED_PASSES * (fitting_s + tries)
    first = hardware.first_uses
    start_s = first.quantise_s + spec.n_layers * first.quantise_layer_s if first else 0.0
    seconds = start_s + moving_s + rounding_s + writing_s
    return named("quantize_s", seconds, "s", "a start, and reading, rounding and writing all weights", "measured")


def _outputs_s(spec: ModelSpec, hardware: Hardware) -> float:
    """The error of every matrix's output, from sums of products of its inputs."""
    return spec.n_layers * sum(2.0 * p.n * p.k**2 for p in block_matrices(spec)) / hardware.peak("fp32")


def _pass_s(spec: ModelSpec, hardware: Hardware, n_tokens: int, row_tokens: int) -> float:
    """The exact stream through every block once, the rounded one as often as its matrices ask for their inputs, two sums of
    products of those inputs, and rounding column after column."""
    matrices = [(product.n, product.k) for product in block_matrices(spec)]
    sizes = [float(n * k) for n, k in matrices]
    before = [sum(sizes[:i]) for i in range(len(sizes))]  # what is computed to reach a matrix
    forwards = 2.0 + sum(before) / sum(sizes)
    walking_s = forwards * n_tokens * decoder_token_s(spec, "fp32", hardware, row_tokens)
    flop = spec.n_layers * sum(4.0 * n_tokens * k * k for _, k in matrices)
    summing_s = flop / hardware.peak("fp32")
    compensated = hardware.weights.compensated_per_s or hardware.weights.rounded_per_s["int4"]
    return walking_s + summing_s + spec.n_layers * sum(sizes) / letter("compensated", compensated)
