"""Runs a native plan. One call of the library computes a whole step, with any mix of prefill and decode rows."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.schemes import CACHES, scheme_of
from twostroke.engine import plan as p
from twostroke.engine.adapters import Parts
from twostroke.engine.expert_load import ExpertLoad
from twostroke.engine.native_adapters import NativeAdapter
from twostroke.engine.native_structs import OPS, CAdapter, CBatch, CModel, COp
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.kernels.native_library import library, why_absent
from twostroke.kernels.native_matrix import FORMATS, NativeExperts, NativeMatrix, NativePair
from twostroke.model.rope import angles
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

if TYPE_CHECKING:
    from jaxtyping import Float

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swish": 3}
_TABLE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NativeRunner:
    """Advances ``pool`` by scheduled steps of a plan lowered with ``native=True``. Raises ConfigError without the library.

    Page tables and all arrays of a step are made once and refilled, so that a decode step costs Python tens of microseconds.
    All runners of a process share the library's one pool of threads. ``whole`` is the runner of the plan of which this one is
    a part: its page table is used, and where this plan is its first layers (``Plan.first``), its adapters are read.
    """

    def __init__(self, plan: p.Plan, pool: TiledKVPool, config: SchedulerConfig, whole: NativeRunner | None = None) -> None:
        loaded = library()
        if loaded is None:
            raise ConfigError(f"runner='native' needs the native library. {why_absent()}")
        loaded.ts_step_create.restype, loaded.ts_step_create.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        loaded.ts_step_destroy.restype, loaded.ts_step_destroy.argtypes = None, [ctypes.c_void_p]
        loaded.ts_step_run.restype, loaded.ts_step_run.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p]
        self._library, self.plan, self.pool = loaded, plan, pool
        self._part_of = whole  # not itself where there is none: a cycle would keep its memory until it is collected
        self._gathers = any(isinstance(op, p.GatherSampledRows) for op in plan.ops)
        self._has_head = isinstance(plan.ops[-1], p.LmHead)
        spec = plan.spec.attended
        self._held: list[Tensor] = []  # tensors that the library points to and the plan does not keep alive
        ops = (COp * len(plan.ops))(*map(self._op, plan.ops))
        # A traced state is one after a whole block, so the block's last operation has to know which block it ends.
        layer = -1
        for made, op in zip(ops, plan.ops, strict=True):
            layer = op.layer if isinstance(op, p.PagedAttention) else layer
            made.layer = layer if isinstance(op, p.OutProjectionAdd | p.MlpDownAdd | p.ExpertsAdd) else made.layer
        turned = [torch.stack(angles(spec, rope, config.max_model_len)) for rope in spec.ropes]  # (2, D/2) each
        all_angles = self._hold(torch.stack(turned)) if turned else None
        scales = [pool.key_scales.data_ptr(), pool.value_scales.data_ptr()] if pool.scaled else [None, None]
        widest = max((op.matrix.n_columns for op in plan.ops if isinstance(op, p.MlpDownAdd)), default=0)
        sizes = (spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim, widest, spec.vocab_size, spec.n_layers)
        places = (pool.keys.data_ptr(), pool.values.data_ptr(), *scales)
        kv_type = CACHES[pool.dtype].native
        model = CModel(
            *sizes, spec.attention_scale, len(turned), all_angles,
            ctypes.addressof(ops), len(ops), kv_type, 0, pool.page_tokens, pool.n_slots, *places,
        )  # fmt: skip
        self._step = loaded.ts_step_create(ctypes.byref(model))
        if not self._step:
            raise CapacityError("not enough memory for the native step's tables. Free some memory, or use a smaller model.")
        weakref.finalize(self, loaded.ts_step_destroy, self._step)
        # A row of the table for each running request; a request has at most the pages of its longest context.
        width = min(config.n_pages, -(-config.max_model_len // config.page_tokens))
        self.table: np.ndarray = np.zeros((config.max_running, width), np.int64) if whole is None else whole.table
        self._starts, self._counts, self._slots = (np.zeros(config.max_running, np.int32) for _ in range(3))
        self._tokens = np.zeros(config.token_budget, np.int32)
        self._n_held = 0
        self._no_hidden = torch.empty((0, spec.d_model))
        self.hidden = self._no_hidden  # (n_hidden, E) in fp32: what the head would read of the last step's rows
        # Rows of logits that stay allocated; more exist only while prompts are scored.
        self._n_usual = config.max_running + config.draft_rows
        self._batch = CBatch(table=self.table.ctypes.data, table_stride=width)
        self._take_logits(0)  # none before the first step: 128 rows of 150,000 words are 77 MB
        arrays = (("starts", self._starts), ("counts", self._counts), ("table_rows", self._slots), ("tokens", self._tokens))
        for name, array in arrays:
            setattr(self._batch, name, array.ctypes.data)
        self.experts = None if spec.moe is None else ExpertLoad(spec)
        if self.experts is not None:
            self._batch.expert_load = self.experts.counts.ctypes.data
            self._batch.experts_touched = self.experts.touched.ctypes.data

    def run(
        self,
        step: ScheduledStep,
        rows: Tensor | None = None,
        n_threads: int = 1,
        all_rows: bool = False,
        trace: Float[Tensor, "states n E"] | None = None,
        n_hidden: int = 0,
        tokens: Sequence[int] | None = None,
    ) -> Float[Tensor, "kept V"]:
        """fp32 logits of the rows that a token is sampled from, of ``rows``, or of all. They are valid until the next call. The
        last ``n_hidden`` of ``rows`` have no logits, but ``hidden``. ``tokens`` stand in for the requests' own where each has
        one row.

        A plan that gathers no rows computes all. With ``n_threads`` 1 the caller's thread computes alone and the pool is not
        woken. ``trace`` receives the residual stream after the embedding and after each block; it needs ``all_rows``, because
        other rows end at the last attention.
        """
        batch, n, requests = self._batch, len(step.requests), step.requests
        if not self._gathers:
            rows, all_rows = None, True
        held = (self._part_of or self)._n_held
        adapters = [getattr(request.adapter, "held", None) for request in requests] if held else []
        if any(adapters):
            batch.adapter_width = max(adapter.width for adapter in adapters if adapter is not None)
            pointers = (ctypes.c_void_p * n)(*(a and ctypes.addressof(self._form_of(a)) for a in adapters))
            batch.adapters = ctypes.addressof(pointers)
        else:
            batch.adapters, batch.adapter_width = None, 0
        for request in step.grown:  # a decoding request gets a page only every 16 tokens; the rest of the table stays
            self.table[request.slot, : len(request.pages)] = request.pages
        self._starts[:n] = step.starts
        self._counts[:n] = step.counts
        self._slots[:n] = [r.slot for r in requests]
        kept: np.ndarray | None = None
        if step.one_row_each:
            n_rows = n  # every row is sampled from, so none needs to be chosen
            own = tokens or [r.tokens[start] for r, start in zip(requests, step.starts, strict=True)]
            self._tokens[:n] = own
        else:
            all_tokens: list[int] = []
            for i in range(n):
                all_tokens += step.tokens_of(i)
            n_rows = len(all_tokens)
            self._tokens[:n_rows] = all_tokens
            if rows is None and not all_rows:
                kept = np.array(step.sampled_rows(), np.int64)
        if rows is not None:
            kept = np.ascontiguousarray(rows.numpy(), np.int64)
        n_kept = n_rows if kept is None else len(kept)
        n_logits = n_kept - n_hidden if self._has_head else 0
        if n_logits <= self._n_usual:  # the last scored prompt is over
            self.release_logits()
        if self._logits.shape[0] < n_logits:
            self._take_logits(n_logits)
        self.hidden = torch.empty((n_hidden, self.plan.spec.d_model)) if n_hidden else self._no_hidden
        batch.hidden, batch.n_hidden = self.hidden.data_ptr() if n_hidden else None, n_hidden
        batch.n_requests = n
        batch.kept, batch.n_kept = (None, 0) if kept is None else (kept.ctypes.data, n_kept)
        batch.trace = None if trace is None else trace.data_ptr()
        batch.n_threads = n_threads
        if self.experts is not None:
            self.experts.touched[0] = 0
        if n_threads > 1 and self._library.ts_threads() != n_threads:
            self._library.ts_set_threads(n_threads)
        if self._library.ts_step_run(self._step, ctypes.byref(batch)):
            raise CapacityError(
                f"not enough memory for the step's scratch buffers (token_budget={len(self._tokens)}, "
                f"max_running={len(self._starts)}). Lower token_budget."
            )
        return self._first(n_logits)[0]

    def _take_logits(self, n: int) -> None:
        self._logits, self._best = torch.empty((n, self.plan.spec.vocab_size)), torch.empty(n)
        self._best_tokens = torch.empty(n, dtype=torch.int64)
        self._batch.logits, self._batch.best = self._logits.data_ptr(), self._best.data_ptr()
        self._batch.best_tokens = self._best_tokens.data_ptr()
        self._rows_of_logits: tuple[Tensor, Tensor, Tensor] | None = None

    def _first(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first ``n`` rows of logits, with the largest of each and its token. The views are kept from step to step: making
        them and reading their addresses took 29 µs of a step of a 135M mixture (Zen 3)."""
        found = self._rows_of_logits
        if found is None or len(found[0]) != n:
            found = self._rows_of_logits = (self._logits[:n], self._best[:n], self._best_tokens[:n])
        return found

    def hold(self, parts: Parts) -> NativeAdapter:
        """The form in which the library reads an adapter."""
        self._n_held += 1
        return NativeAdapter(self.plan, parts, scheme_of(self.plan.weights).adapter_element(native=True))

    def _form_of(self, adapter: NativeAdapter) -> CAdapter:
        return adapter.c if self._part_of is None else adapter.first(len(self.plan.ops) - 2)

    def release_logits(self) -> None:
        """Free the logits if they have more rows than requests may run at once."""
        if self._logits.shape[0] > self._n_usual:
            self._take_logits(0)

    def best_of(self, n: int) -> tuple[Tensor, Tensor]:
        """The largest logit of each of the last step's first ``n`` rows, and its token. It is NaN if the row is not finite."""
        return self._first(n)[1:]

    def _hold(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()

    def _op(self, op: p.Op) -> COp:
        kind, member = next((i, name) for i, (of, name, _) in enumerate(OPS) if isinstance(op, of))
        made = COp(kind=kind)
        to: Any = getattr(made, member)
        if isinstance(op, p.Embed):
            to.scale = op.scale
            to.table, to.table_type = self._table(op.table)
            if op.positions is not None:
                to.positions, to.positions_type = self._table(op.positions)
        elif isinstance(op, p.Norm):
            self._norm(op, to)
        elif isinstance(op, p.QkNorm):
            to.weight, to.eps, to.over_heads = self._hold(op.weight.float()), op.eps, int(op.over_heads)
        elif isinstance(op, p.RopeAndCacheWrite):
            made.layer, to.rope = op.layer, -1 if op.rope is None else op.rope
            if self.pool.scaled:
                to.key_offset = self.pool.key_offset[op.layer].data_ptr()
        elif isinstance(op, p.PagedAttention):
            made.layer, to.window, to.cap = op.layer, op.window or 0, op.cap or 0.0
            to.sinks = None if op.sinks is None else self._hold(op.sinks.float())
        elif isinstance(op, p.RouteTokens):
            self._route(op, to)
        elif isinstance(op, p.LatentProjection):
            self._latent(op, to)
        elif isinstance(op, p.LatentValues):
            to.heads, to.rope = _native(op.heads).matrix.c, op.mla.qk_rope_dim
        elif isinstance(op, p.ExpertsAdd):
            for name, experts in (("gate_up", op.gate_up), ("down", op.down)):
                setattr(to, name, _native(experts).matrix.c)
            to.n_experts, to.top_k = op.gate_up.copies, op.top_k
            to.activation, to.scale = _ACTIVATIONS[op.activation], op.scale
        elif not isinstance(op, p.GatherSampledRows):
            matrix: Any = op.matrix
            if not isinstance(matrix, NativeMatrix | NativePair):
                raise ConfigError("this plan was lowered for torch. Lower it with native=True.")
            # The library has gate and up apart, so that a thread computes the same outputs of both and activates them.
            to.matrix = matrix.gate.c if isinstance(matrix, NativePair) else matrix.c
            if isinstance(op, p.OutProjectionAdd | p.MlpDownAdd):
                to.scale, to.ends_block = op.scale, int(op.ends_block)
                if op.norm is not None:
                    self._norm(op.norm, to.norm)
                to.latent = int(isinstance(op, p.OutProjectionAdd) and self.plan.spec.mla is not None)
            if isinstance(op, p.LmHead):
                to.cap = op.cap or 0.0
            if isinstance(op, p.MlpUp):
                to.activation, to.shared = _ACTIVATIONS[op.activation], int(op.shared)
                if isinstance(matrix, NativePair):
                    to.up = matrix.up.c
        return made

    def _latent(self, op: p.LatentProjection, to: Any) -> None:
        for name, matrix in (("matrix", op.matrix), ("down", op.down), ("kv", op.kv)):
            if matrix is not None:
                assert isinstance(matrix, NativeMatrix)
                setattr(to, name, matrix.c)
        to.absorb = _native(op.absorb).matrix.c
        to.down_norm = None if op.down_norm is None else self._hold(op.down_norm.float())
        to.kv_norm, to.eps = self._hold(op.kv_norm.float()), op.eps
        to.nope, to.rope, to.latent = op.mla.qk_nope_dim, op.mla.qk_rope_dim, op.mla.kv_lora_rank

    def _route(self, op: p.RouteTokens, to: Any) -> None:
        assert isinstance(op.matrix, NativeMatrix)
        to.matrix = op.matrix.c
        if isinstance(op.shared_gate, NativeMatrix):
            to.shared_gate = op.shared_gate.c
        to.correction = None if op.correction is None else self._hold(op.correction.float())
        moe = op.moe
        to.top_k, to.n_groups, to.top_groups = moe.top_k, moe.n_groups, moe.top_groups
        to.sigmoid, to.normalised, to.scale = int(moe.scores == "sigmoid"), int(moe.normalised), moe.share_scale
        to.format = FORMATS[_native(op.experts).matrix.format]

    def _norm(self, norm: p.Norm, to: Any) -> None:
        if norm.weight is not None:
            to.weight, to.eps = self._hold(norm.weight.float()), norm.eps
        if norm.bias is not None:
            to.bias = self._hold(norm.bias.float())

    def _table(self, table: Tensor) -> tuple[int, int]:
        if table.dtype not in _TABLE_TYPES:
            table = table.float()
        return self._hold(table), _TABLE_TYPES[table.dtype]


def _native(experts: Any) -> NativeExperts:
    if not isinstance(experts, NativeExperts):
        raise ConfigError("this plan was lowered for torch. Lower it with native=True.")
    return experts
