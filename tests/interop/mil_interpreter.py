"""Computes Core ML programs without Core ML, which runs on Apple's systems alone: each operation of the program that was saved,
by torch, as Apple's description of it says. It runs where coremltools is, with nothing of ours.

Results have the type and the shape that the program declares, or it stops: Core ML makes room by what is declared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
import torch
from coremltools.converters.mil.frontend.milproto.load import load
from coremltools.converters.mil.mil import types
from torch import Tensor

DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32, "int16": torch.int16, "uint16": torch.int32,
          "bool": torch.bool, "int8": torch.int8, "int4": torch.int8, "uint8": torch.uint8}  # fmt: skip


UNTYPED = ("topk", "constexpr_blockwise_shift_scale")
"""Operations whose results have another type here than there."""


def normed(
    x: Tensor, axes: list[int], gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    return torch.nn.functional.layer_norm(x, [x.shape[axis] for axis in axes], gamma, beta, epsilon)


def sliced(
    x: Tensor, begin: Tensor, end: Tensor, begin_mask: Any = None, end_mask: Any = None, squeeze_mask: Any = None,
    stride: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The index of a slice of ``x``."""
    parts: list[Any] = []
    for i in range(x.ndim):
        if squeeze_mask is not None and squeeze_mask[i]:
            parts.append(int(begin[i]))
            continue
        first = None if begin_mask is not None and begin_mask[i] else int(begin[i])
        last = None if end_mask is not None and end_mask[i] else int(end[i])
        parts.append(slice(first, last, None if stride is None else int(stride[i])))
    return tuple(parts)


def update(x: Tensor, update: Tensor, **where: Any) -> Tensor:
    place = sliced(x, **where)
    assert x[place].shape == update.shape, (x[place].shape, update.shape)
    whole = x.clone()
    whole[place] = update
    return whole


def reshaped(x: Tensor, shape: Any) -> Tensor:
    return x.reshape([x.shape[i] if n == 0 else int(n) for i, n in enumerate(shape)])


def best(x: Tensor, k: int, axis: int, ascending: bool, **rest: Any) -> tuple[Tensor, Tensor]:
    return tuple(torch.topk(x, int(k), dim=int(axis), largest=not ascending))


def scaled(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """Weights of their codes: each scale holds for a block of the axes."""
    assert offset is None
    for axis in range(data.ndim):
        scale = scale.repeat_interleave(data.shape[axis] // scale.shape[axis], dim=axis)
    return data.to(scale.dtype) * scale


def joined(values: list[Tensor], axis: int, interleave: bool) -> Tensor:
    """Sizes have no axis of their own. Interleaved, the first of each come first, then the second."""
    axis = int(axis)
    if interleave:
        return torch.stack(values, dim=axis + 1).flatten(axis, axis + 1)
    return torch.cat([torch.atleast_1d(one) for one in values], dim=axis)


def multiplied(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    return (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)


def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


def divided(x: Tensor, y: Tensor) -> Tensor:
    """Integers are sizes here, and divide without a rest: what becomes of one is not described."""
    if x.is_floating_point():
        return x / y
    assert not (x % y).any()
    return x // y


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "cast": lambda x, dtype: x.to(DTYPES[dtype]),
    "clip": lambda x, alpha, beta: x.clamp(alpha, beta),
    "concat": joined,
    "constexpr_blockwise_shift_scale": scaled,
    "coreml_update_state": lambda value: value,
    "cos": lambda x: x.cos(),
    "equal": lambda x, y: x == y,
    "expand_dims": lambda x, axes: x.reshape(np.expand_dims(np.empty(x.shape), tuple(int(axis) for axis in axes)).shape),
    "fill_like": lambda ref_tensor, value: torch.full(ref_tensor.shape, value.item(), dtype=value.dtype),
    "gather": lambda x, indices, axis, batch_dims, validate_indices: x[indices.long()],
    "gather_along_axis": lambda x, indices, axis, validate_indices: x.gather(int(axis), indices.long()),
    "gelu": gelu,
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "layer_norm": normed,
    "less": lambda x, y: x < y,
    "linear": lambda x, weight, bias=None: torch.nn.functional.linear(x, weight, bias),
    "logical_and": lambda x, y: x & y,
    "matmul": multiplied,
    "mul": lambda x, y: x * y,
    "real_div": divided,
    "reduce_argmax": lambda x, axis, keep_dims, output_dtype="int32": x.argmax(dim=int(axis), keepdim=bool(keep_dims)).int(),
    "reduce_max": lambda x, axes, keep_dims: x.amax(dim=[int(axis) for axis in axes], keepdim=bool(keep_dims)),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(dim=[int(axis) for axis in axes], keepdim=bool(keep_dims)),
    "reduce_sum": lambda x, axes, keep_dims: x.sum(dim=[int(axis) for axis in axes], keepdim=bool(keep_dims)),
    "reshape": reshaped,
    "rsqrt": lambda x, epsilon: (x + epsilon).rsqrt(),
    "select": lambda cond, a, b: torch.where(cond, a, b),
    "shape": lambda x: torch.tensor(x.shape, dtype=torch.int32),
    "sigmoid": lambda x: x.sigmoid(),
    "silu": lambda x: torch.nn.functional.silu(x),
    "sin": lambda x: x.sin(),
    "slice_by_index": lambda x, **where: x[sliced(x, **where)],
    "slice_update": update,
    "softmax": lambda x, axis: x.softmax(dim=int(axis)),
    "split": lambda x, split_sizes, axis: x.split([int(n) for n in split_sizes], dim=int(axis)),
    "square": lambda x: x.square(),
    "squeeze": lambda x, axes: x.reshape(np.squeeze(np.empty(x.shape), tuple(int(axis) for axis in axes)).shape),
    "stack": lambda values, axis: torch.stack(values, dim=int(axis)),
    "sub": lambda x, y: x - y,
    "tanh": lambda x: x.tanh(),
    "tile": lambda x, reps: x.tile([int(n) for n in reps]),
    "topk": best,
    "transpose": lambda x, perm: x.permute([int(axis) for axis in perm]),
}


class Program:
    """The program of a package: ``Program(folder)(tokens, input_pos)`` gives its outputs by name and keeps its states."""

    def __init__(self, folder: Path) -> None:
        package = str(folder / "model.mlpackage")
        spec = coremltools.utils.load_spec(package)
        self.description = spec.description
        self.main = load(spec, spec.specificationVersion, package + "/Data/com.apple.CoreML/weights").functions["main"]
        self.constants: dict[str, Any] = {}
        self.states = {
            state.name: torch.zeros(tuple(state.type.stateType.arrayType.shape), dtype=torch.float16)
            for state in self.description.state
        }

    def __call__(self, tokens: list[int], start: int) -> dict[str, Tensor]:
        place = torch.arange(start, start + len(tokens), dtype=torch.int32)
        known: dict[str, Any] = {"tokens": torch.tensor([tokens], dtype=torch.int32), "input_pos": place}

        def value(one: Any) -> Any:
            if isinstance(one, list | tuple):
                return [value(part) for part in one]
            if one.op is None or one.op.op_type != "const":
                return known[one.name]
            if one.name not in self.constants:
                held = one.val
                if isinstance(held, np.ndarray | np.generic) and held.dtype.kind in "fiub":
                    kind = types.builtin_to_string(one.dtype)
                    held = torch.from_numpy(np.ascontiguousarray(held)).view(np.shape(held)).to(DTYPES[kind])
                self.constants[one.name] = held
            return self.constants[one.name]

        for op in self.main.operations:
            if op.op_type == "const":
                continue
            words = {name: value(one) for name, one in op.inputs.items() if name not in ("input", "state")}
            if op.op_type == "read_state":
                results: Any = self.states[op.input.name].clone()
            else:
                results = OPERATIONS[op.op_type](**words)
            if op.op_type == "coreml_update_state":
                self.states[op.state.name] = results
            results = results if isinstance(results, tuple) else (results,)
            for output, result in zip(op.outputs, results, strict=True):
                kind = types.builtin_to_string(output.dtype)
                known[output.name] = result.to(DTYPES[kind]) if op.op_type in UNTYPED else result
                declared, shape = tuple(output.shape), tuple(result.shape)
                same = (not isinstance(n, int | np.integer) or n == m for n, m in zip(declared, shape, strict=True))
                assert all(same), (op.op_type, op.name, shape, declared)
                assert known[output.name].dtype == DTYPES[kind], (op.op_type, op.name, result.dtype, kind)
        return {output.name: known[output.name] for output in self.main.outputs}
