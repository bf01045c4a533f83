"""The KV cache of the torch runner: one array of token slots for each layer. The scheduler hands it out in pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.spec import ModelSpec
from twostroke.engine.memory import forget, untouched_zeros
from twostroke.engine.tiers.images import PageImages
from twostroke.planner.work.weights import kv_bytes_per_token

if TYPE_CHECKING:
    from jaxtyping import Float


def token_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of keys and values of one token in all layers, scales included, as ``ModelSpec.attended`` has them."""
    return int(kv_bytes_per_token(spec.attended, dtype))


def all_finite(heads: Tensor) -> bool:
    """Whether every number is finite. NaN and infinities come through a sum, which takes 36 µs for 512 tokens of 6 heads; the
    largest magnitude takes 68. Many large numbers may also sum to infinity, so then each number is looked at."""
    return math.isfinite(heads.sum()) or bool(torch.isfinite(heads).all())


def poison(heads: Float[Tensor, "2K n D"]) -> Float[Tensor, "2K n D"]:
    """Where a head's key or value is not finite, the key becomes NaN and the value zero.

    A row that sees the token gets NaN from its score. A row that does not see it multiplies its value by zero, and zero times
    zero is harmless. So neither other rows of the request nor the next request on the page are spoilt, and pages need not be
    cleared when they are released. ``store_poison`` in kernels/native/elementwise_body.h does the same.
    """
    keys, values = heads.clone().chunk(2)
    bad = ~(torch.isfinite(keys) & torch.isfinite(values)).all(dim=2)
    keys[bad], values[bad] = float("nan"), 0.0
    return torch.cat((keys, values))


class KVPool:
    """``layer(i)`` is (2K, slots, D): K key heads, then K value heads, each a run of ``n_pages``·``page_tokens`` slots.

    Heads come first, so that neighbouring pages of one request are one matrix for each head, without a copy. The system hands
    out zeroed memory as it is touched, so a large pool costs nothing at start. It must be zeroed: attention multiplies the
    value of a masked slot by zero, and zero times a stray NaN is NaN. ``poisoned`` says that some token's key or value was not
    finite (``poison``).
    """

    poisoned = False

    def __init__(self, spec: ModelSpec, n_pages: int, page_tokens: int, dtype: str) -> None:
        self.n_pages, self.page_tokens, self.dtype = n_pages, page_tokens, dtype
        spec = spec.attended
        self.n_kv_heads, self.head_dim = spec.n_kv_heads, spec.head_dim
        self.n_bytes = token_bytes(spec, dtype) * n_pages * page_tokens
        shape = (spec.n_layers, 2 * spec.n_kv_heads, n_pages * page_tokens, spec.head_dim)
        raw = torch.from_numpy(untouched_zeros(self.n_bytes))
        self.storage = raw.view(torch.float32 if dtype == "fp32" else torch.bfloat16).view(shape)
        self._layers = tuple(self.storage)
        self._halves = tuple(layer[:, None].split(spec.n_kv_heads) for layer in self._layers)  # (K, 1, slots, D) twice
        self._paged = tuple(layer.view(2 * spec.n_kv_heads, n_pages, page_tokens * spec.head_dim) for layer in self._layers)

    def layer(self, i: int) -> Float[Tensor, "2K slots D"]:
        return self._layers[i]

    def write(self, i: int, slots: Tensor, heads: Float[Tensor, "2K n D"]) -> None:
        """Keys and values of new tokens into their slots."""
        held = heads.to(self.storage.dtype)  # before the check, because the largest fp32 numbers become infinite in bf16
        if not all_finite(held):
            held = poison(held)
            self.poisoned = True
        self._layers[i].index_copy_(1, slots, held)

    def run(self, i: int, first_slot: int, n_slots: int) -> tuple[Float[Tensor, "K 1 S D"], Float[Tensor, "K 1 S D"]]:
        """Keys and values of neighbouring slots, as views."""
        keys, values = self._halves[i]
        return keys.narrow(2, first_slot, n_slots), values.narrow(2, first_slot, n_slots)

    def gather(self, i: int, pages: Tensor, n_rows: int) -> tuple[Float[Tensor, "K B S D"], Float[Tensor, "K B S D"]]:
        """Keys and values of ``n_rows`` requests with equally many pages each, copied."""
        copied = self._paged[i].index_select(1, pages).view(2, self.n_kv_heads, n_rows, -1, self.head_dim)
        return copied[0], copied[1]

    def images(self) -> PageImages:
        """Pages as strings of bytes."""
        runs = self.storage.view(torch.uint8).numpy()
        return PageImages([runs.reshape(-1, self.n_pages, self.page_tokens * self.head_dim * self.storage.element_size())])

    def forget(self) -> None:
        """Give the memory of all pages back to the system until they are written again."""
        forget(self.storage.data_ptr(), self.storage.nbytes)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the first page of each pair to the second, in every layer."""
        sources, targets = map(list, zip(*pairs, strict=True))
        for layer in self._paged:
            layer[:, targets] = layer[:, sources]
