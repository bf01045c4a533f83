"""Writes Core ML packages (.mlpackage) for macOS 15 and iOS 18, by ``torch.export`` and the coremltools package.

Inputs: ``tokens`` (1, T) and ``input_pos`` (T), both int32, positions in order without gaps. Output: ``logits`` (1, V) of the
last token in fp32. Of each layer two states, ``k_cache_i`` and ``v_cache_i`` (1, K, S, D) in fp16, the only type that Core ML
has for states; a text that begins at position 0 does not see what they held. coremltools converts on any system, and Core ML
runs on Apple's alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twostroke.core.aside import flush_to_disk
from twostroke.core.dtypes import bytes_of
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.moved import Held, Made
from twostroke.interop.static_decoder import (
    GROUP,
    StaticDecoder,
    expect_program,
    is_rounded,
    notes_of,
    require_groups,
    write_companions,
)

MODEL = "model.mlpackage"
_BITS = {"int8": 8, "int4": 4}

_FP32 = ("square", "reduce_mean", "rsqrt", "layer_norm", "cos", "sin")
"""Operations that programs in fp16 compute in fp32, beside the angles: the square of 256 overflows, and the angles of position
1,000 would be up to 0.25 radians wrong."""


class WithStates(nn.Module):
    """The decoder with its cache as buffers that a call changes."""

    def __init__(self, decoder: StaticDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        for layer, pair in enumerate(decoder.empty_cache()):
            for kind, zeros in zip("kv", pair, strict=True):
                self.register_buffer(f"{kind}_cache_{layer}", zeros.half())

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        states = [[getattr(self, f"{kind}_cache_{i}") for kind in "kv"] for i in range(self.decoder.spec.n_layers)]
        logits, after = self.decoder(tokens, input_pos.long(), [(k.float(), v.float()) for k, v in states])
        for old, new in zip(states, after, strict=True):
            for buffer, now in zip(old, new, strict=True):
                buffer.copy_(now)
        return logits


def expect_coreml(source: ExportSource, held: Held, precision: str) -> Made:
    """What the package holds, nearly: ``expect_program`` in fp16, or in fp32."""
    return expect_program(source, held, precision, number_bytes=bytes_of("fp32" if precision == "fp32" else "fp16"))


def write_coreml(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with the package, the tokenizer and the configuration. int8 and int4 are weights of products, symmetric,
    with a scale for each output or for each group of 32, the head in 8 bits, and are computed in fp16. Memory: several times
    the model in fp32. Raises ConfigError in int4 if 32 does not divide what its products read."""
    if precision == "int4":
        require_groups(source.spec, "coreml")
    program = WithStates(StaticDecoder(source).eval()).eval()
    with _quiet():
        with source.stage("tracing"):
            graph = traced(program)
        with source.stage("converting"):
            model = _converted(graph, precision)
        if precision in _BITS:
            with source.stage("rounding"):
                model = _rounded(model, program.decoder, precision)
        with source.stage("writing the package"):
            model.save(str(out / MODEL))
            for path in (out / MODEL).rglob("*"):
                flush_to_disk(path)
    write_companions(source, out)
    note = "Core ML runs on Apple's systems alone, from macOS 15 and iOS 18 on: nothing ran this package here."
    return (*notes_of(source.spec), note)


def traced(program: WithStates) -> torch.export.ExportedProgram:
    """The graph of ``program`` for any number of tokens, of operations that coremltools knows or is taught."""
    n_tokens = torch.export.Dim("n_tokens", min=1, max=program.decoder.n_context - 1)
    example = torch.zeros(1, 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    with torch.no_grad():
        graph = torch.export.export(program, example, dynamic_shapes=({1: n_tokens}, {0: n_tokens}))
        return graph.run_decompositions(_instead())


def _instead() -> dict[Any, Any]:
    """Operations that coremltools 9.0 does not know, or not where a size is not known, as others."""
    aten = torch.ops.aten

    def chosen_are(x: Tensor, axis: int, chosen: Tensor, value: float) -> Tensor:
        """``scatter`` of one number along the last axis."""
        assert axis in (-1, x.ndim - 1)
        hits = (chosen[..., None] == torch.arange(x.shape[-1])).float().sum(dim=-2)
        return aten.where.self(hits > 0, torch.full((), value, dtype=x.dtype), x)

    return {
        aten.__and__.Tensor: aten.bitwise_and.Tensor,
        aten.scatter.value: chosen_are,
        aten.where.ScalarOther: lambda condition, a, b: aten.where.self(condition, a, torch.full((), b, dtype=a.dtype)),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without coremltools' bars and warnings: that it does not know this torch, and that Core ML is not on this system."""
    from tqdm import tqdm

    logger, bars = logging.getLogger("coremltools"), tqdm.__init__
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        tqdm.__init__ = functools.partialmethod(bars, disable=True)  # not by redirecting stderr, which has our own bar
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own trees
            warnings.simplefilter("ignore", RuntimeWarning)  # the mask becomes -inf in fp16
            yield
    finally:
        tqdm.__init__ = bars
        logger.setLevel(level)


def _converted(traced: torch.export.ExportedProgram, precision: str) -> Any:
    import coremltools
    import numpy as np

    _teach()
    compute = coremltools.precision.FLOAT32
    if precision != "fp32":
        compute = coremltools.transform.FP16ComputePrecision(op_selector=lambda op: not _needs_fp32(op))
    return coremltools.convert(
        traced,
        outputs=[coremltools.TensorType(name="logits", dtype=np.float32)],
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=compute,
        skip_model_load=True,
    )


def _needs_fp32(op: Any) -> bool:
    makes_angles = any(after.op_type in ("cos", "sin") for output in op.outputs for after in output.child_ops)
    return op.op_type in _FP32 or makes_angles


def _teach() -> None:
    """Operations that coremltools 9.0 does not know, or computes otherwise than torch."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs
    from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op

    @register_torch_op(override=True)
    def index_copy(context: Any, node: Any) -> None:
        """A write of consecutive rows, which Core ML does in the state's own memory. coremltools has none of them."""
        x, axis, positions, new = _get_inputs(context, node, expected=4)
        start = mb.slice_by_index(x=positions, begin=[0], end=[1])
        end = mb.add(x=start, y=mb.shape(x=positions))
        whole = [i != axis.val for i in range(x.rank)]
        begin, end = (mb.concat(values=[[0] if all_of else one for all_of in whole], axis=0) for one in (start, end))
        context.add(mb.slice_update(x=x, update=new, begin=begin, end=end, begin_mask=whole, end_mask=whole, name=node.name))

    @register_torch_op(override=True)
    def rms_norm(context: Any, node: Any) -> None:
        """coremltools divides x by its largest value m and adds ε to the mean of squares of that, so its ε is ε·m²."""
        x, shape, weight, eps = _get_inputs(context, node, expected=4)
        axes = list(range(-len(shape.val), 0))
        mean = mb.reduce_mean(x=mb.square(x=x), axes=axes, keep_dims=True)
        normed = mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=eps.val))
        context.add(mb.mul(x=normed, y=weight, name=node.name))

    @register_torch_op(torch_alias=["where.self"], override=True)
    def where(context: Any, node: Any) -> None:
        """coremltools takes the shape of the two values for that of the result, and leaves out the condition's."""
        condition, a, b = _get_inputs(context, node, expected=3)
        zeros = mb.mul(x=mb.cast(x=condition, dtype="fp32"), y=0.0)
        context.add(mb.select(cond=condition, a=mb.add(x=zeros, y=a), b=mb.add(x=zeros, y=b), name=node.name))


def _rounded(model: Any, decoder: StaticDecoder, precision: str) -> Any:
    """``model`` with weights of all products as integers, by coremltools.optimize."""
    from coremltools.optimize import coreml as rounding

    def config(bits: int) -> Any:
        granularity = {"granularity": "per_block", "block_size": GROUP} if bits == 4 else {"granularity": "per_channel"}
        return rounding.OpLinearQuantizerConfig(mode="linear_symmetric", dtype=f"int{bits}", weight_threshold=0, **granularity)

    products = [op for op in model._mil_program.functions["main"].operations if op.op_type == "linear"]
    by_name = {products[-1].weight.name: config(8)}  # the head's, which may be the embedding's too
    for name, module in decoder.decoder.blocks.named_modules():
        if is_rounded(module, name):
            by_name[f"p_decoder_decoder_blocks_{name.replace('.', '_')}_weight_to_fp16"] = config(_BITS[precision])
    unknown = by_name.keys() - {op.weight.name for op in products}
    if unknown:
        raise RuntimeError(f"coremltools named weights otherwise than expected: {sorted(unknown)}")
    return rounding.linear_quantize_weights(model, rounding.OptimizationConfig(op_name_configs=by_name))
