"""Writes ONNX files: a graph as protobuf messages, with the tensors of weights in a file beside it.

Field numbers are those of ``onnx.proto`` (onnx/onnx, IR version 10); the encoding is that of protocol buffers. A graph is a
list of nodes, so the ``onnx`` package, of 18 MB, is not needed.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

OPSET = 20
"""Of plain operations: the first with ``Gelu``."""
CONTRIB = "com.microsoft"
_IR_VERSION = 10
_ALIGNMENT = 4096  # of a tensor in its file, so that a runtime can map it

ELEMENT_TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int64: 7, torch.bool: 9, torch.float16: 10,
}  # fmt: skip

Attribute = int | float | str | Sequence[int]
Shape = Sequence[int | str]


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _whole(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _inside(field: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _attribute(name: str, value: Attribute) -> bytes:
    head = _inside(1, name)
    if isinstance(value, int):
        return head + _whole(3, value) + _whole(20, 2)
    if isinstance(value, float):
        return head + _varint(2 << 3 | 5) + struct.pack("<f", value) + _whole(20, 1)
    if isinstance(value, str):
        return head + _inside(4, value) + _whole(20, 3)
    return head + b"".join(_whole(8, one) for one in value) + _whole(20, 7)


def _value(name: str, kind: torch.dtype, shape: Shape) -> bytes:
    dims = (_inside(1, _whole(1, n) if isinstance(n, int) else _inside(2, n)) for n in shape)
    tensor = _whole(1, ELEMENT_TYPES[kind]) + _inside(2, b"".join(dims))
    return _inside(1, name) + _inside(2, _inside(1, tensor))


class OnnxFile:
    """A graph that grows by ``node`` and ``constant``. ``weight`` writes a tensor to ``stream`` at once, so that no more than
    one is in memory; ``stream`` is the file ``data_name``, beside the graph."""

    def __init__(self, stream: BinaryIO, data_name: str) -> None:
        self._stream, self._data_name, self.data_bytes = stream, data_name, 0
        self._parts: list[bytes] = []
        self._known: dict[tuple[torch.dtype, tuple[int, ...], bytes], str] = {}
        self._number = 0

    def _new_name(self, kind: str) -> str:
        self._number += 1
        return f"{kind}_{self._number}"

    def input(self, name: str, kind: torch.dtype, shape: Shape) -> str:
        self._parts.append(_inside(11, _value(name, kind, shape)))
        return name

    def output(self, name: str, kind: torch.dtype, shape: Shape) -> None:
        self._parts.append(_inside(12, _value(name, kind, shape)))

    def node(self, kind: str, *inputs: str, name: str = "", domain: str = "", **attributes: Attribute) -> str:
        """The result of the operation ``kind``, called ``name`` if it has a name of its own."""
        return self._add(kind, inputs, (name or self._new_name(kind),), domain, attributes)[0]

    def nodes(self, kind: str, *inputs: str, n: int, **attributes: Attribute) -> tuple[str, ...]:
        """The ``n`` results of an operation."""
        return self._add(kind, inputs, tuple(self._new_name(kind) for _ in range(n)), "", attributes)

    def _add(
        self, kind: str, inputs: Sequence[str], found: tuple[str, ...], domain: str, attributes: Mapping[str, Attribute]
    ) -> tuple[str, ...]:
        content = [_inside(1, one) for one in inputs] + [_inside(2, one) for one in found]
        content += [_inside(3, found[0]), _inside(4, kind)]
        content += [_inside(5, _attribute(key, value)) for key, value in attributes.items()]
        content += [_inside(7, domain)] if domain else []
        self._parts.append(_inside(1, b"".join(content)))
        return found

    def constant(self, value: Tensor) -> str:
        """A small tensor, kept in the graph, once."""
        raw = _raw(value)
        key = (value.dtype, tuple(value.shape), raw)
        if key not in self._known:
            self._known[key] = self._new_name("constant")
            self._parts.append(_inside(5, self._tensor(self._known[key], value) + _inside(9, raw)))
        return self._known[key]

    def weight(self, name: str, value: Tensor) -> str:
        """A tensor in the file beside the graph, under ``name``."""
        begin = -(-self.data_bytes // _ALIGNMENT) * _ALIGNMENT
        self._write(value, begin - self.data_bytes)
        self.data_bytes = begin + value.nbytes
        place = {"location": self._data_name, "offset": str(begin), "length": str(value.nbytes)}
        entries = b"".join(_inside(13, _inside(1, key) + _inside(2, text)) for key, text in place.items())
        self._parts.append(_inside(5, self._tensor(name, value) + entries + _whole(14, 1)))
        return name

    def _write(self, value: Tensor, n_before: int) -> None:
        """``n_before`` zeros, then ``value``."""
        self._stream.write(bytes(n_before))
        self._stream.write(_raw(value))

    @staticmethod
    def _tensor(name: str, value: Tensor) -> bytes:
        dims = b"".join(_whole(1, n) for n in value.shape)
        return dims + _whole(2, ELEMENT_TYPES[value.dtype]) + _inside(8, name)

    def content(self, name: str, producer: str) -> bytes:
        """The file of the graph."""
        graph = b"".join(self._parts) + _inside(2, name)
        opsets = (_inside(8, _inside(1, domain) + _whole(2, version)) for domain, version in (("", OPSET), (CONTRIB, 1)))
        return _whole(1, _IR_VERSION) + _inside(2, producer) + _inside(7, graph) + b"".join(opsets)


class CountedFile(OnnxFile):
    """The same without the file beside it, of weights that may be on device "meta". ``plain_sizes``: bytes of those that are no
    codes."""

    def __init__(self, data_name: str) -> None:
        super().__init__(io.BytesIO(), data_name)
        self.plain_sizes: list[int] = []

    def _write(self, value: Tensor, n_before: int) -> None:
        if value.dtype is not torch.uint8:
            self.plain_sizes.append(value.nbytes)


def _raw(value: Tensor) -> bytes:
    return value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
