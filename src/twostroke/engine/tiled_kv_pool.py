"""The KV cache as the native step reads it: in tiles of sixteen slots, with the keys of a tile side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy as shallow_copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import CACHES
from twostroke.core.spec import ModelSpec
from twostroke.engine.kv_pool import all_finite, poison, token_bytes
from twostroke.engine.memory import forget, untouched_zeros
from twostroke.engine.tiers.images import PageImages
from twostroke.kernels.four_bit_cache import (
    hadamard,
    key_codes,
    keys_of,
    pack_halves,
    pack_neighbours,
    unpack_halves,
    unpack_neighbours,
    value_codes,
    values_of,
)

if TYPE_CHECKING:
    from jaxtyping import Float

TILE = 16
SLACK = 256
"""Bytes behind each array. Whole vectors may read them; nothing comes of what they read."""


class TiledKVPool:
    """Slot s of a layer and head is lane s % 16 of tile s / 16. A tile's keys are (D/p, 16, p) and its values (16/p, D, p):
    p = 2 numbers lie side by side in bf16 and int8, 1 in fp32. A vector then holds one pair of dimensions of sixteen keys, and
    scores need no sum across lanes.

    ``int8`` are symmetric codes, with one fp32 scale for each slot and head, keys and values apart. Before keys are coded, the
    ``key_offset`` (layers, K, D) is subtracted. Softmax does not see it (``engine.key_offset``), so it is not added back.

    ``int4`` are codes of transformed heads (``kernels.four_bit_cache``), two a byte: a tile's keys are (D/2, 16) bytes of
    neighbouring codes, its values (16, D/2) bytes of codes D/2 apart. Two slots share no byte, so threads may write them at
    once. Keys have the scale and the middle of their range, in bf16, in the place of one scale.

    The methods that the torch interpreter calls take and return plain tensors. They are the reference, and slow. The system
    hands out zeroed memory as it is touched; ``KVPool`` says why zeros matter, and what ``poisoned`` is.
    """

    poisoned = False

    def __init__(self, spec: ModelSpec, n_pages: int, page_tokens: int, dtype: str) -> None:
        self.n_pages, self.page_tokens, self.dtype = n_pages, page_tokens, dtype
        spec = spec.attended
        self.n_kv_heads, self.head_dim = spec.n_kv_heads, spec.head_dim
        # Whole tiles: the last may reach beyond the last page.
        self.n_slots = -(-n_pages * page_tokens // TILE) * TILE
        self.n_bytes = token_bytes(spec, dtype) * n_pages * page_tokens
        self.scaled = CACHES[dtype].scaled
        self.four_bits = CACHES[dtype].transformed
        held = torch.uint8 if self.four_bits else getattr(torch, TORCH_NAMES[dtype])
        self.pair = pair = 1 if dtype == "fp32" or self.four_bits else 2
        self.width = -(-spec.head_dim // 2) if self.four_bits else spec.head_dim  # of a head, in what is stored
        heads = (spec.n_layers, spec.n_kv_heads, self.n_slots // TILE)
        self.keys = self._zeros((*heads, -(-self.width // pair), TILE, pair), held)
        self.values = self._zeros((*heads, TILE // pair, self.width, pair), held)
        n_scales = (spec.n_layers, spec.n_kv_heads, self.n_slots if self.scaled else 0)
        self.value_scales = self._zeros(n_scales, torch.float32)
        of_key = torch.bfloat16 if self.four_bits else torch.float32
        self.key_scales = self._zeros((*n_scales, 2) if self.four_bits else n_scales, of_key)
        self.key_offset = torch.zeros((spec.n_layers if self.scaled else 0, spec.n_kv_heads, spec.head_dim))

    @staticmethod
    def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        n_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(untouched_zeros(n_bytes + SLACK)[:n_bytes]).view(dtype).view(shape)

    def beside(self) -> TiledKVPool:
        """The same slots for other weights, whose keys have a ``key_offset`` of their own."""
        made = shallow_copy(self)
        made.key_offset = torch.zeros_like(self.key_offset)
        return made

    def write(self, layer: int, slots: Tensor, heads: Float[Tensor, "2K n D"]) -> None:
        """Keys and values of new tokens into their slots."""
        # Rounded before the check, because the largest fp32 numbers become infinite in bf16.
        held = heads.float() if self.scaled else heads.to(self.keys.dtype).float()
        if self.four_bits:
            held = hadamard(torch.cat((held[: self.n_kv_heads] - self.key_offset[layer][:, None], held[self.n_kv_heads :])))
        if not all_finite(held):
            held = poison(held)
            self.poisoned = True
        new_keys, new_values = held.split(self.n_kv_heads)
        tile, lane, pair = slots // TILE, slots % TILE, self.pair
        if self.four_bits:
            codes, self.key_scales[layer][:, slots] = key_codes(new_keys)
            new_keys = pack_neighbours(codes)
            codes, self.value_scales[layer][:, slots] = value_codes(new_values)
            new_values = pack_halves(codes)
        elif self.scaled:
            new_keys = self._codes(new_keys - self.key_offset[layer][:, None], self.key_scales[layer], slots)
            new_values = self._codes(new_values, self.value_scales[layer], slots)
        # An odd head dimension is filled up to whole pairs with a zero, which adds nothing to a score.
        new_keys = torch.nn.functional.pad(new_keys, (0, -self.width % pair)).unflatten(2, (-1, pair))
        self.keys[layer][:, tile, :, lane] = new_keys.transpose(0, 1).to(self.keys.dtype)
        self.values[layer][:, tile, lane // pair, :, lane % pair] = new_values.transpose(0, 1).to(self.values.dtype)

    @staticmethod
    def _codes(heads: Tensor, scales: Tensor, slots: Tensor) -> Tensor:
        scale = heads.abs().amax(dim=2).clamp_min_(1e-30) / 127  # a head of zeros must not divide by zero
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
        # A page of -1 was released behind a window: any page will do, because all of it is masked.
        return (pages.clamp_min(0)[:, None] * self.page_tokens + torch.arange(self.page_tokens)).flatten()

    def _read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        tile, lane, pair = slots // TILE, slots % TILE, self.pair
        # Cut without the zero that fills up an odd head dimension.
        keys = self.keys[layer][:, tile, :, lane].flatten(2)[..., : self.width].transpose(0, 1)
        values = self.values[layer][:, tile, lane // pair, :, lane % pair].transpose(0, 1)
        if self.four_bits:
            keys = keys_of(unpack_neighbours(keys, self.head_dim), self.key_scales[layer][:, slots])
            values = values_of(unpack_halves(values, self.head_dim), self.value_scales[layer][:, slots])
            return hadamard(keys), hadamard(values)
        keys, values = keys.float(), values.float()
        if self.scaled:
            keys = keys * self.key_scales[layer][:, slots, None]
            values = values * self.value_scales[layer][:, slots, None]
        return keys, values

    def images(self) -> PageImages:
        """Pages as strings of bytes. Raises ConfigError if they are not whole tiles."""
        if self.page_tokens % TILE:
            raise ConfigError(f"page_tokens={self.page_tokens} must be a multiple of {TILE} for pages to leave memory.")
        heads = self.keys.shape[0] * self.keys.shape[1]
        held = [self.keys, self.values, *((self.key_scales, self.value_scales) if self.scaled else ())]
        return PageImages([part.view(torch.uint8).numpy().reshape(heads, self.n_pages, -1) for part in held])

    def forget(self) -> None:
        """Give the memory of all pages back to the system until they are written again."""
        for held in (self.keys, self.values, self.key_scales, self.value_scales):
            forget(held.data_ptr(), held.nbytes)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first page of each pair to the second, in every layer."""
        if self.page_tokens % TILE == 0:
            self.images().copy(*zip(*pairs, strict=True))
            return
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
