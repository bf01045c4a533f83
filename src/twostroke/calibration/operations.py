"""Measures the torch runner's small operations and its attention, whose time grows with tokens and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.calibration.timing import Clock
from twostroke.core.crossovers import Crossovers
from twostroke.core.policy import PREFILL_QUERIES
from twostroke.core.rates import PromptAttention
from twostroke.kernels.attention import explicit_attention, flash_attention
from twostroke.planner.serving.torch_runner import keys_of_prefill

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS, HEAD_DIM, D_FF, PAGE, LAYERS = 4, 64, 704, 16, 6
WIDTH = HEADS * HEAD_DIM
LEAST_FIXED_S = 1e-7


def fixed_and_rate(few: float, many: float, few_s: float, many_s: float) -> tuple[float, float]:
    """(seconds of zero units, units per second) of the line through two measurements. Noise cannot make either negative, and no
    operation starts in less than ``LEAST_FIXED_S``."""
    per_unit = max((many_s - few_s) / (many - few), 1e-3 * many_s / many)
    return max(few_s - few * per_unit, LEAST_FIXED_S), 1.0 / per_unit


def layer_elements(rows: int) -> float:
    """Elements that one layer's small operations read and write: 9E for two norms and two sums, 4·H·D for rotating heads and 3F
    for the activation, as the planner counts them (``elementwise_elements``), and 2·H·D for writing the cache."""
    return rows * (9.0 * WIDTH + 6.0 * WIDTH + 3.0 * D_FF)


@torch.inference_mode()
def _layer_operations_s(clock: Clock, rows: int, dtype: torch.dtype) -> float:
    """Seconds of the norms, rotation, cache write and activation of one layer, as the mean over ``LAYERS`` layers in turn."""
    x, norm = torch.randn(rows, WIDTH).to(dtype), torch.ones(WIDTH, dtype=dtype)
    qkv = torch.randn(rows, 3 * HEADS, HEAD_DIM).to(dtype)
    wide = torch.randn(rows, 2 * D_FF).to(dtype)
    rotation = torch.randn(rows, 1, HEAD_DIM // 2, dtype=torch.complex64)
    pool = torch.zeros(LAYERS, 2 * HEADS, rows + PAGE, HEAD_DIM, dtype=dtype)
    slots = torch.arange(rows)

    def layers() -> None:
        for layer in range(LAYERS):
            F.rms_norm(x, norm.shape, norm, 1e-5)
            _rope_and_cache_write(qkv, rotation, pool[layer], slots)
            F.rms_norm(x, norm.shape, norm, 1e-5)
            gate, up = wide.chunk(2, dim=-1)
            F.silu(gate).mul_(up)

    return clock.best_s(layers, seconds=0.05, least=4) / LAYERS


def _rope_and_cache_write(qkv: Tensor, rotation: Tensor, layer: Tensor, slots: Tensor) -> None:
    rotated = qkv[:, : 2 * HEADS]
    values = rotated.float()
    torch.view_as_complex(values.view(*values.shape[:2], -1, 2)).mul_(rotation)
    if values.dtype != rotated.dtype:
        rotated.copy_(values)
    layer.index_copy_(1, slots, qkv[:, HEADS:].transpose(0, 1))


def measure_layer_operations(clock: Clock) -> dict[str, float]:
    """Elements per second of a layer's small operations on the rows of a prompt, for each type."""
    few, many = 64, 512
    seconds = {name: [_layer_operations_s(clock, rows, dtype) for rows in (few, many)] for name, dtype in DTYPES.items()}
    return {name: fixed_and_rate(layer_elements(few), layer_elements(many), *s)[1] for name, s in seconds.items()}


# -- attention ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _attend_one_s(clock: Clock, keys: int, flash: bool) -> float:
    """Seconds of one layer's attention, in bf16, of one token to the cached keys of its request."""
    pool = torch.randn(LAYERS, 2 * HEADS, keys, HEAD_DIM).to(torch.bfloat16)
    q = torch.randn(HEADS, 1, 1, 1, HEAD_DIM).to(torch.bfloat16)
    kernel = flash_attention if flash else explicit_attention

    def layers() -> None:
        for layer in range(LAYERS):
            k, v = (half[:, None] for half in pool[layer].split(HEADS))
            kernel(q, k, v, None, HEAD_DIM**-0.5)

    return clock.best_s(layers, seconds=0.03, least=4) / LAYERS


def measure_flash_limit(clock: Clock) -> float:
    """``flash_max_scores``: up to so many (request, KV head, key) triples of a bf16 decode the flash kernel is faster."""
    limit = 0.0
    for keys in (32, 64, 128, 256, 512):
        if _attend_one_s(clock, keys, flash=True) > _attend_one_s(clock, keys, flash=False):
            break
        limit = float(HEADS * keys)
    return limit if limit else Crossovers().flash_max_scores / 4


@torch.inference_mode()
def measure_prefill_attention(clock: Clock, lengths: Sequence[int]) -> Iterator[PromptAttention]:
    """FLOP/s of one prompt's attention in one layer, for each length. Blocks of ``PREFILL_QUERIES`` queries take the keys up to
    their last one, and FLOP are counted over the keys taken: 4·H·D·Σ queries·keys."""
    for name, dtype in DTYPES.items():
        for tokens in lengths:
            q = torch.randn(tokens, HEADS, HEAD_DIM).to(dtype)
            keys, values = (torch.randn(HEADS, 1, tokens, HEAD_DIM).to(dtype) for _ in range(2))
            size = min(PREFILL_QUERIES, tokens)
            hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
            mask = torch.zeros(1, size, size, dtype=dtype).masked_fill_(hidden, float("-inf"))
            queries = q.view(1, tokens, HEADS, 1, HEAD_DIM).permute(2, 0, 1, 3, 4)

            def blocks(queries=queries, keys=keys, values=values, mask=mask, tokens=tokens, size=size) -> None:  # type: ignore[no-untyped-def]
                parts = []
                for first in range(0, tokens - size + 1, size):
                    end = first + size
                    block = (queries[:, :, first:end], keys[:, :, :end], values[:, :, :end])
                    parts.append(explicit_attention(*block, mask, HEAD_DIM**-0.5))
                torch.cat(parts, dim=2)

            flops = 4.0 * HEADS * HEAD_DIM * tokens * keys_of_prefill(tokens)
            yield PromptAttention(name, tokens, flops / clock.best_s(blocks, seconds=0.06, least=4))
