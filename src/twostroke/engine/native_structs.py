"""The structures that the native step reads: those of kernels/native/step.h, field by field.

``native_library.mirror`` compares the size of each with the library's.
"""

from __future__ import annotations

import ctypes

from twostroke.engine import plan as p
from twostroke.kernels.native_library import mirror
from twostroke.kernels.native_matrix import CMatrix

_I32, _I64, _F32, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


@mirror("Embed")
class CEmbed(ctypes.Structure):
    _fields_ = [("table", _POINTER), ("positions", _POINTER), ("table_type", _I32), ("positions_type", _I32), ("scale", _F32)]


@mirror("Norm")
class CNorm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("eps", _F32)]


@mirror("QkvProjection")
class CProduct(ctypes.Structure):
    _fields_ = [("matrix", CMatrix)]


@mirror("LmHead")
class CLmHead(ctypes.Structure):
    _fields_ = [("matrix", CMatrix), ("cap", _F32)]


@mirror("OutProjectionAdd")
class CProductAdd(ctypes.Structure):
    """``MlpDownAdd`` too."""

    _fields_ = [("matrix", CMatrix), ("norm", CNorm), ("scale", _F32), ("ends_block", _I32), ("latent", _I32)]


@mirror("LatentProjection")
class CLatentProjection(ctypes.Structure):
    _fields_ = [
        *((name, CMatrix) for name in ("matrix", "down", "kv", "absorb")),
        ("down_norm", _POINTER),
        ("kv_norm", _POINTER),
        *((name, _I64) for name in ("nope", "rope", "latent")),
        ("eps", _F32),
    ]


@mirror("LatentValues")
class CLatentValues(ctypes.Structure):
    _fields_ = [("heads", CMatrix), ("rope", _I64)]


@mirror("QkNorm")
class CQkNorm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("eps", _F32), ("over_heads", _I32)]


@mirror("RopeAndCacheWrite")
class CRopeAndCacheWrite(ctypes.Structure):
    _fields_ = [("key_offset", _POINTER), ("rope", _I32)]


@mirror("PagedAttention")
class CPagedAttention(ctypes.Structure):
    _fields_ = [("sinks", _POINTER), ("window", _I64), ("cap", _F32)]


@mirror("GatherSampledRows")
class CGatherSampledRows(ctypes.Structure):
    _fields_ = [("unused", _I64)]


@mirror("MlpUp")
class CMlpUp(ctypes.Structure):
    _fields_ = [("matrix", CMatrix), ("up", CMatrix), ("activation", _I32), ("shared", _I32)]


@mirror("RouteTokens")
class CRouteTokens(ctypes.Structure):
    _fields_ = [
        ("matrix", CMatrix),
        ("shared_gate", CMatrix),
        ("correction", _POINTER),
        *((name, _I32) for name in ("format", "top_k", "n_groups", "top_groups", "sigmoid", "normalised")),
        ("scale", _F32),
    ]


@mirror("ExpertsAdd")
class CExpertsAdd(ctypes.Structure):
    _fields_ = [
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("n_experts", _I64),
        ("top_k", _I64),
        ("activation", _I32),
        ("scale", _F32),
    ]


OPS: tuple[tuple[type, str, type[ctypes.Structure]], ...] = (
    (p.Embed, "embed", CEmbed),
    (p.Norm, "norm", CNorm),
    (p.QkvProjection, "qkv_projection", CProduct),
    (p.LatentProjection, "latent_projection", CLatentProjection),
    (p.LatentValues, "latent_values", CLatentValues),
    (p.QkNorm, "qk_norm", CQkNorm),
    (p.RopeAndCacheWrite, "rope_and_cache_write", CRopeAndCacheWrite),
    (p.PagedAttention, "paged_attention", CPagedAttention),
    (p.GatherSampledRows, "gather_sampled_rows", CGatherSampledRows),
    (p.OutProjectionAdd, "out_projection_add", CProductAdd),
    (p.MlpUp, "mlp_up", CMlpUp),
    (p.MlpDownAdd, "mlp_down_add", CProductAdd),
    (p.RouteTokens, "route_tokens", CRouteTokens),
    (p.ExpertsAdd, "experts_add", CExpertsAdd),
    (p.LmHead, "lm_head", CLmHead),
)
"""``TS_OPS``: each operation of the plan, its member of the union, and the member's type, in the order of ``OpKind``."""


class _Held(ctypes.Union):
    _fields_ = [(name, held) for _, name, held in OPS]


@mirror("StepOp")
class COp(ctypes.Structure):
    _anonymous_ = ("held",)
    _fields_ = [("kind", _I32), ("layer", _I32), ("held", _Held)]


@mirror("StepModel")
class CModel(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in ("d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "n_layers")),
        ("attention_scale", _F32),
        ("n_ropes", _I32),
        ("angles", _POINTER),
        ("ops", _POINTER),
        ("n_ops", _I64),
        ("kv_type", _I32),
        ("unused", _I32),
        ("page_tokens", _I64),
        ("n_slots", _I64),
        *((name, _POINTER) for name in ("keys", "values", "key_scales", "value_scales")),
    ]


@mirror("StepBatch")
class CBatch(ctypes.Structure):
    _fields_ = [
        ("n_requests", _I64),
        *((name, _POINTER) for name in ("starts", "counts", "table_rows", "tokens", "table")),
        ("table_stride", _I64),
        ("kept", _POINTER),
        ("n_kept", _I64),
        ("logits", _POINTER),
        ("best", _POINTER),
        ("best_tokens", _POINTER),
        ("trace", _POINTER),
        ("n_threads", _I64),
        ("expert_load", _POINTER),
        ("experts_touched", _POINTER),
        ("adapters", _POINTER),
        ("adapter_width", _I64),
        ("hidden", _POINTER),
        ("n_hidden", _I64),
    ]


MOST_PARTS = 3
"""Of an adapter at one operation: queries, keys and values."""


@mirror("AdapterPart")
class CAdapterPart(ctypes.Structure):
    _fields_ = [
        ("packed", _POINTER),
        ("begin", _I64),
        ("n", _I64),
        *((name, _I32) for name in ("first", "k", "second", "unused")),
    ]


@mirror("AdapterAt")
class CAdapterAt(ctypes.Structure):
    _fields_ = [
        ("packed", _POINTER),
        ("scales", _POINTER),
        ("n", _I64),
        ("n_parts", _I64),
        ("parts", CAdapterPart * MOST_PARTS),
    ]


@mirror("Adapter")
class CAdapter(ctypes.Structure):
    _fields_ = [("at", _POINTER), ("form", _I64)]
