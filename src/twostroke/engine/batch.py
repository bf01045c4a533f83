"""From a scheduled step to the tensors that the interpreter reads: rows, cache slots, and which keys each row may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.core.spec import ModelSpec
from twostroke.model.rope import rope_tables
from twostroke.scheduling.request import Request
from twostroke.scheduling.scheduler import ScheduledStep, SchedulerConfig

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int

MAX_SCORES = 8 * 2**20
"""Most attention scores held at once for a block of query tokens, all heads together."""

MAX_BLOCK = 128
"""Most query tokens of a block: a causal chunk in blocks skips the keys after each block's end."""


@dataclass(frozen=True, eq=False)
class Keys:
    """Where the keys of ``n_rows`` requests lie: one run of slots from ``first_slot`` on (one request, neighbouring pages), or
    ``pages``, equally many for each request. The first ``n_slots`` of them are read."""

    n_rows: int
    n_slots: int
    first_slot: int
    pages: Int[Tensor, " pages"] | None


@dataclass(frozen=True, eq=False)
class Block:
    """Query tokens ``first`` … ``end`` of the group's requests see slots ``first_slot`` … ``end_slot`` under ``mask``."""

    first: int
    end: int
    first_slot: int
    end_slot: int
    mask: Float[Tensor, "B T S"] | None


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of the step that attention takes in one go: one token of each of B requests, or T tokens of one request.

    ``rows`` is a slice of the step's rows, or their indices.
    """

    rows: slice | Int[Tensor, " B"]
    keys: Keys
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One step, flat: n rows of all requests one after another."""

    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]
    turn: Complex[Tensor, "n 1 half_D"] | None
    groups: dict[int | None, tuple[Group, ...]]  # by window
    sampled_rows: Int[Tensor, " sampled"] | None  # None: all of them

    @property
    def n_rows(self) -> int:
        return self.tokens.shape[0]


class BatchBuilder:
    """Keeps the page tables of running requests as an array, so that a step touches only the rows that grew."""

    def __init__(self, spec: ModelSpec, config: SchedulerConfig, dtype: str) -> None:
        self.spec = spec
        self.page_tokens = config.page_tokens
        self.dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        width = min(config.n_pages, -(-config.max_model_len // config.page_tokens))
        self.table = np.zeros((config.max_running, width), np.int64)
        windows = {spec.window_of_layer(i) for i in range(spec.n_layers)}
        self.windows = tuple(windows)
        self.heads_budget = max(1, MAX_SCORES // spec.n_heads)

    def build(self, step: ScheduledStep, all_rows: bool = False) -> StepBatch:
        """Tensors of ``step``. ``all_rows``: logits of every row are wanted, not only of those that a token is sampled from."""
        for request in step.grown:
            self.table[request.slot, : len(request.pages)] = request.pages
        requests, counts = step.requests, np.array(step.counts)
        starts, slot = np.array(step.starts), np.array([r.slot for r in requests])
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
        pages = self.table[np.repeat(slot, counts), positions // self.page_tokens]
        slots = pages * self.page_tokens + positions % self.page_tokens
        tokens = _tokens(requests, step)
        samples = starts + counts == np.array([len(r.tokens) for r in requests])
        whole = all_rows or (len(requests) == len(positions) and bool(samples.all()))
        positions_tensor = torch.from_numpy(positions)
        return StepBatch(
            tokens=torch.tensor(tokens),
            positions=positions_tensor,
            slots=torch.from_numpy(slots),
            turn=self._turn(positions_tensor),
            groups={w: tuple(self._groups(w, starts, counts, ends, slot)) for w in self.windows},
            sampled_rows=None if whole else torch.from_numpy(ends[samples] - 1),
        )

    def _turn(self, positions: Tensor) -> Tensor | None:
        if self.spec.positions != "rope":
            return None
        cos, sin = rope_tables(self.spec, positions[:, None])  # (n, 1, D/2)
        return torch.complex(cos, sin)

    def _groups(
        self, window: int | None, starts: np.ndarray, counts: np.ndarray, ends: np.ndarray, slot: np.ndarray
    ) -> list[Group]:
        groups: list[Group] = []
        single = np.flatnonzero(counts == 1)
        if len(single):
            groups += self._decode_groups(window, starts[single], ends[single] - 1, slot[single])
        for i in np.flatnonzero(counts > 1):
            groups.append(self._chunk(window, int(starts[i]), int(counts[i]), int(ends[i]), int(slot[i])))
        return groups

    def _decode_groups(self, window: int | None, positions: np.ndarray, rows: np.ndarray, slot: np.ndarray) -> list[Group]:
        """Requests with one token each, together where padding them to the longest costs at most as much again."""
        first_page = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0) // self.page_tokens
        n_pages = positions // self.page_tokens - first_page + 1
        widest = int(n_pages.max())
        if len(rows) * widest <= 2 * int(n_pages.sum()):
            return [self._decode_group(window, positions, rows, slot, first_page, widest)]
        groups = []
        classes = np.frexp(n_pages.astype(np.float64))[1]  # one group for each power of two
        for size in np.unique(classes):
            of = np.flatnonzero(classes == size)
            groups.append(self._decode_group(window, positions[of], rows[of], slot[of], first_page[of], int(n_pages[of].max())))
        return groups

    def _decode_group(
        self,
        window: int | None,
        positions: np.ndarray,
        rows: np.ndarray,
        slot: np.ndarray,
        first_page: np.ndarray,
        n_pages: int,
    ) -> Group:
        n = len(rows)
        columns = first_page[:, None] + np.arange(n_pages)
        # A shorter request's table ends earlier; what stands there is a page of zeros or of its past, and is masked.
        pages = self.table[slot[:, None], np.minimum(columns, self.table.shape[1] - 1)]
        first_key = first_page * self.page_tokens
        n_keys = positions - first_key + 1  # up to and with the row's own
        n_slots = int(n_keys.max())
        skipped = np.zeros_like(n_keys) if window is None else np.maximum(n_keys - window, 0)
        if n == 1:  # nothing to pad, so nothing to mask
            keys = _keys_of_one(pages[0], self.page_tokens, n_slots)
            return Group(slice(int(rows[0]), int(rows[0]) + 1), keys, (Block(0, 1, int(skipped[0]), n_slots, None),))
        slot_index = np.arange(n_slots)
        hidden = (slot_index >= n_keys[:, None]) | (slot_index < skipped[:, None])
        mask = self._mask(hidden[:, None]) if hidden.any() else None
        keys = Keys(n, n_slots, -1, torch.from_numpy(pages.reshape(-1)))
        in_order = int(rows[-1]) - int(rows[0]) == n - 1
        where = slice(int(rows[0]), int(rows[-1]) + 1) if in_order else torch.from_numpy(rows)
        return Group(where, keys, (Block(0, 1, 0, n_slots, mask),))

    def _chunk(self, window: int | None, start: int, count: int, end: int, slot: int) -> Group:
        """``count`` tokens of one request from position ``start`` on, in blocks."""
        first_page = 0 if window is None else max(start - window + 1, 0) // self.page_tokens
        first_key = first_page * self.page_tokens
        n_slots = start + count - first_key
        pages = self.table[slot, first_page : (start + count - 1) // self.page_tokens + 1]
        keys = _keys_of_one(pages, self.page_tokens, n_slots)
        size = max(1, min(MAX_BLOCK, self.heads_budget // n_slots))
        blocks = []
        for first in range(0, count, size):
            last = min(first + size, count)
            query = np.arange(start + first, start + last)
            least = 0 if window is None else max(start + first - window + 1, 0)
            key = np.arange(least, start + last)
            hidden = key > query[:, None]
            if window is not None:
                hidden |= key <= query[:, None] - window
            mask = self._mask(hidden[None]) if hidden.any() else None
            blocks.append(Block(first, last, least - first_key, start + last - first_key, mask))
        return Group(slice(end - count, end), keys, tuple(blocks))

    def _mask(self, hidden: np.ndarray) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))


def _tokens(requests: Sequence[Request], step: ScheduledStep) -> list[int]:
    tokens = [r.tokens[start] for r, start in zip(requests[: step.n_decodes], step.starts, strict=False)]
    for i in range(step.n_decodes, len(requests)):
        start = step.starts[i]
        tokens += requests[i].tokens[start : start + step.counts[i]]
    return tokens


def _keys_of_one(pages: np.ndarray, page_tokens: int, n_slots: int) -> Keys:
    """The keys of one request: a run where its pages are ascending neighbours, else gathered."""
    if len(pages) == 1 or bool((np.diff(pages) == 1).all()):
        return Keys(1, n_slots, int(pages[0]) * page_tokens, None)
    return Keys(1, n_slots, -1, torch.from_numpy(pages.copy()))
