"""Cached keys and values as the native step reads them: sixteen slots a tile, keys across lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.schemes import CACHES
from twostroke.core.spec import ModelSpec
from twostroke.engine.kv_pool import all_finite, poison, token_bytes
from twostroke.engine.memory import untouched_zeros

if TYPE_CHECKING:
    from jaxtyping import Float

TILE = 16
SLACK = 256
"""Bytes behind the arrays that whole vectors may read and nothing is made of."""


class TiledKVPool:
    """Slot s of a layer and head is lane s % 16 of tile s / 16. Keys of a tile are (D/p, 16, p), values (16/p, D, p), p = 2
    numbers side by side in bf16 and int8, 1 in fp32: a vector holds one pair of dimensions of sixteen keys, so scores need no
    sum across lanes. ``int8``: symmetric codes, one fp32 scale a slot, head and kind; of keys the ``key_offset`` (layers, K, D)
    is taken off first, which softmax does not see (``engine.key_offset``), so what is read back is without it.

    The methods that the torch interpreter calls give and take plain tensors; they are the reference, not fast. Memory comes
    zeroed from the system as it is touched (``KVPool`` says why zeros matter, and what ``poisoned`` is).
    """

    poisoned = False

    def __init__(self, spec: ModelSpec, n_pages: int, page_tokens: int, dtype: str) -> None:
        self.n_pages, self.page_tokens, self.dtype = n_pages, page_tokens, dtype
        self.n_kv_heads, self.head_dim = spec.n_kv_heads, spec.head_dim
        self.n_slots = -(-n_pages * page_tokens // TILE) * TILE
        self.n_bytes = token_bytes(spec, dtype) * n_pages * page_tokens
        self.scaled = CACHES[dtype].scaled
        held = getattr(torch, TORCH_NAMES[dtype])
        self.pair = pair = 1 if dtype == "fp32" else 2
        heads = (spec.n_layers, spec.n_kv_heads, self.n_slots // TILE)
        self.keys = self._zeros((*heads, -(-spec.head_dim // pair), TILE, pair), held)
        self.values = self._zeros((*heads, TILE // pair, spec.head_dim, pair), held)
        n_scales = (spec.n_layers, spec.n_kv_heads, self.n_slots if self.scaled else 0)
        self.key_scales, self.value_scales = (self._zeros(n_scales, torch.float32) for _ in range(2))
        self.key_offset = torch.zeros((spec.n_layers if self.scaled else 0, spec.n_kv_heads, spec.head_dim))

    @staticmethod
    def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        n_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(untouched_zeros(n_bytes + SLACK)[:n_bytes]).view(dtype).view(shape)

    def write(self, layer: int, slots: Tensor, heads: Float[Tensor, "2K n D"]) -> None:
        """Keys and values of new tokens into their slots."""
        held = heads.float() if self.scaled else heads.to(self.keys.dtype).float()
        if not all_finite(held):
            held = poison(held)
            self.poisoned = True
        new_keys, new_values = held.split(self.n_kv_heads)
        tile, lane, pair = slots // TILE, slots % TILE, self.pair
        if self.scaled:
            new_keys = self._codes(new_keys - self.key_offset[layer][:, None], self.key_scales[layer], slots)
            new_values = self._codes(new_values, self.value_scales[layer], slots)
        new_keys = torch.nn.functional.pad(new_keys, (0, -self.head_dim % pair)).unflatten(2, (-1, pair))
        self.keys[layer][:, tile, :, lane] = new_keys.transpose(0, 1).to(self.keys.dtype)
        self.values[layer][:, tile, lane // pair, :, lane % pair] = new_values.transpose(0, 1).to(self.values.dtype)

    @staticmethod
    def _codes(heads: Tensor, scales: Tensor, slots: Tensor) -> Tensor:
        scale = heads.abs().amax(dim=2).clamp_min_(1e-30) / 127
        scales[:, slots] = scale
        return (heads * scale.reciprocal()[:, :, None]).round_().clamp_(-127, 127)

    def run(self, layer: int, first_slot: int, n_slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values, (K, 1, S, D) each, of neighbouring slots."""
        keys, values = self._read(layer, torch.arange(first_slot, first_slot + n_slots))
        return keys[:, None], values[:, None]

    def gather(self, layer: int, pages: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values, (K, B, S, D) each, of ``n_rows`` requests with equally many pages each."""
        keys, values = self._read(layer, self._slots(pages))
        return keys.unflatten(1, (n_rows, -1)), values.unflatten(1, (n_rows, -1))

    def _slots(self, pages: Tensor) -> Tensor:
        return (pages.clamp_min(0)[:, None] * self.page_tokens + torch.arange(self.page_tokens)).flatten()

    def _read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        tile, lane, pair = slots // TILE, slots % TILE, self.pair
        keys = self.keys[layer][:, tile, :, lane].float().flatten(2)[..., : self.head_dim].transpose(0, 1)
        values = self.values[layer][:, tile, lane // pair, :, lane % pair].float().transpose(0, 1)
        if self.scaled:
            keys = keys * self.key_scales[layer][:, slots, None]
            values = values * self.value_scales[layer][:, slots, None]
        return keys, values

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """What the first page of each pair holds, in every layer, into the second."""
        sources, targets = (self._slots(torch.tensor(pages)) for pages in zip(*pairs, strict=True))
        pair = self.pair
        (tile, lane), (to_tile, to_lane) = ((slots // TILE, slots % TILE) for slots in (sources, targets))
        for layer in range(self.keys.shape[0]):
            keys, values = self.keys[layer], self.values[layer]
            keys[:, to_tile, :, to_lane] = keys[:, tile, :, lane]
            values[:, to_tile, to_lane // pair, :, to_lane % pair] = values[:, tile, lane // pair, :, lane % pair]
        if self.scaled:
            self.key_scales[:, :, targets] = self.key_scales[:, :, sources]
            self.value_scales[:, :, targets] = self.value_scales[:, :, sources]
