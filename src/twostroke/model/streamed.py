"""A decoder that may be larger than memory: one piece of it at a time, the embedding, a block or the head, is read when it is
computed.

A walk over many tokens block by block reads each piece once: ``hidden_of_each``, and the fitting of codes. ``hidden`` reads
every block for one input. All compute what the decoder of ``load_model`` computes, bit for bit (tests/model/test_streamed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twostroke.core.families import layout
from twostroke.core.families.weights import Entry
from twostroke.core.spec import ModelSpec
from twostroke.model.decoder import Decoder
from twostroke.model.families import read_entry
from twostroke.model.load import filled, open_weights, torch_dtype

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Input = tuple[Tensor, Tensor, Tensor | None]
"""Tokens (B, T), their positions (#B, T) and documents (B, T), as ``Decoder.hidden`` takes them."""

KEPT = ("position_embed", "final_norm")
"""What is small and stays in memory."""


class StreamedDecoder(Decoder):
    """The decoder of ``spec`` on ``device``, whose weights ``get`` reads by the family's names, as ``open_weights`` returns it.

    Memory: the largest piece in ``dtype``, and one stored tensor. It computes forward only, and its mode is always eval.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, get: Callable[[str], Tensor]) -> None:
        super().__init__(spec, dtype, device="meta")
        self.device, self._get = torch.device(device), get
        self._entries: dict[str, list[Entry]] = {}
        for entry in layout(spec):
            self._entries.setdefault(_piece_of(entry.canonical), []).append(entry)
        self._in_memory: str | None = None
        self.blocks = _Blocks(self.blocks, self._held)
        self.eval()
        for name in KEPT:
            if name in self._entries:
                self._fill(name)

    @property
    def total_bytes(self) -> int:
        """Of all weights as they are computed with."""
        return _bytes_of(self)

    @property
    def piece_bytes(self) -> int:
        """Of the largest piece."""
        return max(_bytes_of(self.get_submodule(name)) for name in self._entries)

    @property
    def head_weight(self) -> Float[Tensor, "V E"]:
        self._held("embed" if self.head is None else "head")
        return super().head_weight

    def embedded(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T E"]:
        self._held("embed")
        return super().embedded(tokens)

    def hidden_of_each(self, inputs: Sequence[Input]) -> Iterator[Float[Tensor, "B T E"]]:
        """``hidden`` of each of ``inputs``, for all of which a block is read once. Memory: their residual streams."""
        streams = [self.entered(tokens, positions) for tokens, positions, _ in inputs]
        for number in range(self.spec.n_layers):
            for i, (_, positions, documents) in enumerate(inputs):
                streams[i] = self.through(streams[i], positions, documents, range(number, number + 1))
        while streams:
            yield self.read_out(streams.pop(0))

    def _held(self, name: str) -> nn.Module:
        """The piece ``name``, which is the one in memory from now on."""
        if name != self._in_memory:
            if self._in_memory is not None:
                self._drop(self._in_memory)
            self._in_memory = None
            self._fill(name)
            self._in_memory = name
        return self.get_submodule(name)

    def _drop(self, name: str) -> None:
        with torch.inference_mode(False):  # tensors that are made in that mode could not be used outside of it
            self.get_submodule(name).to_empty(device="meta")

    def _fill(self, name: str) -> None:
        entries = ((entry.canonical.removeprefix(f"{name}."), read_entry(entry, self._get)) for entry in self._entries[name])
        with torch.inference_mode(False):
            filled(self.get_submodule(name), self.device, entries)


class _Blocks(nn.ModuleList):
    """Blocks without weights, of which ``take`` fills the one that is asked for."""

    def __init__(self, blocks: nn.ModuleList, take: Callable[[str], nn.Module]) -> None:
        super().__init__(blocks)
        self._take = take

    def __getitem__(self, number: int) -> Any:  # type: ignore[override]
        return self._take(f"blocks.{range(len(self))[number]}")

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[number] for number in range(len(self)))


def stream_model(directory: Path | str, dtype: str = "fp32", device: torch.device | str = "cpu") -> StreamedDecoder:
    """The decoder in ``directory``, as ``load_model`` returns it but for the memory. Raises what that raises."""
    wanted = torch_dtype(dtype)
    spec, get = open_weights(directory)
    return StreamedDecoder(spec, wanted, device, get)


def _piece_of(canonical: str) -> str:
    """The module that the tensor ``canonical`` is read with."""
    words = canonical.split(".")
    return ".".join(words[:2]) if words[0] == "blocks" else words[0]


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
