"""Turns a scheduled step into the tensors that the interpreter reads: rows, cache slots, and which keys each row may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.core.policy import PREFILL_QUERIES
from twostroke.core.spec import ModelSpec
from twostroke.engine.adapters import Parts
from twostroke.model.rope import angles
from twostroke.scheduling.request import Request
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int

MAX_SCORES = 16 * 2**20
"""Most attention scores of a block of query tokens, all heads together: 64 MiB in fp32."""


@dataclass(frozen=True, eq=False)
class Keys:
    """Where the keys of ``n_rows`` requests lie: in one run of slots from ``first_slot`` on (one request with neighbouring
    pages), or in ``pages``, equally many for each request. ``n_slots`` slots of each request are read."""

    n_rows: int
    n_slots: int
    first_slot: int
    pages: Int[Tensor, " pages"] | None


@dataclass(frozen=True, eq=False)
class Block:
    """Query tokens [``first``, ``end``) of the group's requests see slots [``first_slot``, ``end_slot``). ``mask`` covers the
    last M of these slots; all queries see those before."""

    first: int
    end: int
    first_slot: int
    end_slot: int
    mask: Float[Tensor, "B T M"] | None


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of the step that one call of attention takes: one token of each of B requests, or T tokens of one request.

    ``rows`` is a slice of the step's rows, or their indices.
    """

    rows: slice | Int[Tensor, " B"]
    keys: Keys
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One step as flat tensors: the n rows of all requests, one request after another."""

    tokens: Int[Tensor, " n"]
    positions: Int[Tensor, " n"]
    slots: Int[Tensor, " n"]
    rotations: tuple[Complex[Tensor, "n 1 half_D"], ...]  # of each of the model's ``ropes``
    groups: dict[int | None, tuple[Group, ...]]  # by window, because layers with different windows see different keys
    sampled_rows: Int[Tensor, " sampled"] | None  # None: all rows
    n_hidden: int = 0  # the last sampled rows, which have hidden states and no logits
    adapters: tuple[Parts, ...] = ()  # those of the step's rows
    adapter_of: Int[Tensor, " n"] | None = None  # which of them a row has, -1: none; None: no row has one

    @property
    def n_rows(self) -> int:
        return self.tokens.shape[0]


class BatchBuilder:
    """Keeps the page tables of running requests as an array, so that a step touches only the rows that grew."""

    def __init__(self, spec: ModelSpec, config: SchedulerConfig, dtype: str) -> None:
        spec = spec.attended
        self.page_tokens = config.page_tokens
        self.dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        width = min(config.n_pages, -(-config.max_model_len // config.page_tokens))
        self.table = np.zeros((config.max_running, width), np.int64)
        self.in_a_row = [False] * config.max_running  # whether a request's pages are ascending neighbours
        self.windows = tuple({spec.window_of_layer(i) for i in range(spec.n_layers)})
        self.heads_budget = max(1, MAX_SCORES // spec.n_heads)
        self.triangles: dict[int, Tensor] = {}
        self.angles = [angles(spec, rope, config.max_model_len) for rope in spec.ropes]

    def build(self, step: ScheduledStep, all_rows: bool = False) -> StepBatch:
        """Tensors of ``step``. ``all_rows`` asks for logits of every row, not only of those that a token is sampled from."""
        batch = self._build(step, all_rows)
        held = [getattr(request.adapter, "held", None) for request in step.requests]
        if not any(held):
            return batch
        adapters = tuple({id(parts): parts for parts in held if parts is not None}.values())
        numbers = {id(parts): i for i, parts in enumerate(adapters)}
        of_requests = torch.tensor([numbers.get(id(parts), -1) for parts in held])
        return replace(batch, adapters=adapters, adapter_of=of_requests.repeat_interleave(torch.tensor(step.counts)))

    def _build(self, step: ScheduledStep, all_rows: bool) -> StepBatch:
        for request in step.grown:
            self.table[request.slot, : len(request.pages)] = request.pages
            # Neighbouring pages are one view of the pool; others have to be copied together.
            self.in_a_row[request.slot] = request.pages == list(range(request.pages[0], request.pages[0] + len(request.pages)))
        requests = step.requests
        starts, slot = np.array(step.starts), np.array([r.slot for r in requests])
        if step.one_row_each:
            return self._decode_batch(requests, starts, slot)
        counts = np.array(step.counts)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
        tokens: list[int] = []
        for i in range(len(requests)):
            tokens += step.tokens_of(i)
        sampled = step.sampled_rows()
        whole = all_rows or len(sampled) == len(positions)
        positions_tensor = torch.from_numpy(positions)
        return StepBatch(
            tokens=torch.tensor(tokens),
            positions=positions_tensor,
            slots=torch.from_numpy(self._slots(np.repeat(slot, counts), positions)),
            rotations=self._rotations(positions_tensor),
            groups={w: tuple(self._groups(w, starts, counts, ends, slot)) for w in self.windows},
            sampled_rows=None if whole else torch.tensor(sampled, dtype=torch.int64),
        )

    def _decode_batch(self, requests: Sequence[Request], positions: np.ndarray, slot: np.ndarray) -> StepBatch:
        """The usual step: one token of each request, and a token is sampled from every row."""
        positions_tensor = torch.from_numpy(positions)
        rows = np.arange(len(requests))
        return StepBatch(
            tokens=torch.tensor([r.tokens[-1] for r in requests]),
            positions=positions_tensor,
            slots=torch.from_numpy(self._slots(slot, positions)),
            rotations=self._rotations(positions_tensor),
            groups={w: tuple(self._decode_groups(w, positions, rows, slot)) for w in self.windows},
            sampled_rows=None,
        )

    def _slots(self, slot: np.ndarray, positions: np.ndarray) -> np.ndarray:
        page, offset = np.divmod(positions, self.page_tokens)
        slots: np.ndarray = self.table[slot, page] * self.page_tokens + offset
        return slots

    def _rotations(self, positions: Tensor) -> tuple[Tensor, ...]:
        """cos + i·sin of position·frequency, as complex numbers: ``model.rope.rope_tables`` computes the same angles."""
        at = positions[:, None, None].float()
        turned = ((at * of.frequencies, of.magnitudes) for of in self.angles)  # (n, 1, D/2)
        return tuple(torch.complex(by.cos() * magnitude, by.sin() * magnitude) for by, magnitude in turned)

    def _groups(
        self, window: int | None, starts: np.ndarray, counts: np.ndarray, ends: np.ndarray, slot: np.ndarray
    ) -> list[Group]:
        single = np.flatnonzero(counts == 1)
        groups = self._decode_groups(window, starts[single], ends[single] - 1, slot[single]) if len(single) else []
        for i in np.flatnonzero(counts > 1):
            groups.append(self._chunk(window, int(starts[i]), int(counts[i]), int(ends[i]), int(slot[i])))
        return groups

    def _decode_groups(self, window: int | None, positions: np.ndarray, rows: np.ndarray, slot: np.ndarray) -> list[Group]:
        """Groups of requests with one token each: a single group if padding all to the longest reads at most twice the keys."""
        if len(rows) == 1:
            return [self._single(window, int(positions[0]), int(rows[0]), int(slot[0]))]
        first_page = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0) // self.page_tokens
        n_pages = positions // self.page_tokens - first_page + 1
        widest = int(n_pages.max())
        if len(rows) * widest <= 2 * int(n_pages.sum()):
            return [self._decode_group(window, positions, rows, slot, first_page, widest)]
        groups = []
        # One group for each power of two of pages, so that no group reads more than twice its keys.
        classes = np.frexp(n_pages.astype(np.float64))[1]
        for size in np.unique(classes):
            of = np.flatnonzero(classes == size)
            if len(of) == 1:
                groups.append(self._single(window, int(positions[of[0]]), int(rows[of[0]]), int(slot[of[0]])))
            else:
                widest = int(n_pages[of].max())
                groups.append(self._decode_group(window, positions[of], rows[of], slot[of], first_page[of], widest))
        return groups

    def _single(self, window: int | None, position: int, row: int, slot: int) -> Group:
        """One token of one request: nothing to pad, so nothing to mask."""
        least = 0 if window is None else max(position - window + 1, 0)
        keys, first_key = self._keys_of_one(slot, least, position + 1)
        block = Block(0, 1, least - first_key, position + 1 - first_key, None)
        return Group(slice(row, row + 1), keys, (block,))

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
        # A shorter request's table ends earlier. Behind its end stands a page of zeros or one of an earlier request, and both
        # are masked. It may also be -1, a page that was released behind a window: any page will do for that.
        pages = np.maximum(self.table[slot[:, None], np.minimum(columns, self.table.shape[1] - 1)], 0)
        n_slots = n_pages * self.page_tokens
        n_keys = positions - first_page * self.page_tokens + 1  # up to and with the row's own
        index = np.arange(n_slots)
        hidden = index >= n_keys[:, None]
        if window is not None:
            hidden |= index < n_keys[:, None] - window
        mask = self._mask(hidden[:, None]) if hidden.any() else None
        in_order = int(rows[-1]) - int(rows[0]) == n - 1
        where = slice(int(rows[0]), int(rows[-1]) + 1) if in_order else torch.from_numpy(rows)
        return Group(where, Keys(n, n_slots, -1, torch.from_numpy(pages.reshape(-1))), (Block(0, 1, 0, n_slots, mask),))

    def _chunk(self, window: int | None, start: int, count: int, end: int, slot: int) -> Group:
        """``count`` tokens of one request from position ``start`` on, in blocks that skip the keys after their last query."""
        keys, first_key = self._keys_of_one(slot, 0 if window is None else max(start - window + 1, 0), start + count)
        size = max(1, min(PREFILL_QUERIES, self.heads_budget // keys.n_slots))
        blocks = []
        for first in range(0, count, size):
            last = min(first + size, count)
            least = 0 if window is None else max(start + first - window + 1, 0)
            if window is None or start + last <= window:
                mask = self._causal(last - first)
            else:
                query, key = np.arange(start + first, start + last)[:, None], np.arange(least, start + last)
                mask = self._mask(((key > query) | (key <= query - window))[None])
            blocks.append(Block(first, last, least - first_key, start + last - first_key, mask))
        return Group(slice(end - count, end), keys, tuple(blocks))

    def _keys_of_one(self, slot: int, first: int, end: int) -> tuple[Keys, int]:
        """Where positions [``first``, ``end``) of a request lie, and the position at which the first of these pages begins."""
        first_page, last_page = first // self.page_tokens, (end - 1) // self.page_tokens
        first_key = first_page * self.page_tokens
        if self.in_a_row[slot]:
            return Keys(1, end - first_key, int(self.table[slot, first_page]) * self.page_tokens, None), first_key
        pages = self.table[slot, first_page : last_page + 1].copy()
        return Keys(1, len(pages) * self.page_tokens, -1, torch.from_numpy(pages)), first_key

    def _causal(self, n: int) -> Tensor | None:
        """The mask of ``n`` successive query tokens, of which none sees a key after itself: a triangle over the last n keys.
        It is kept, because most blocks have ``PREFILL_QUERIES`` tokens."""
        if n == 1:
            return None
        if n not in self.triangles:
            self.triangles[n] = self._mask(~np.tri(n, dtype=bool)[None])
        return self.triangles[n]

    def _mask(self, hidden: np.ndarray) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
