"""bitsandbytes as transformers saves it: NF4 and FP4 (``load_in_4bit``), LLM.int8() (``load_in_8bit``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twostroke.core.documents import Allowance, is_integer, is_number, parse_json
from twostroke.core.errors import ConfigError
from twostroke.core.families.quantised import BITSANDBYTES
from twostroke.core.families.reader import Reader
from twostroke.model.published.patterns import listed, named
from twostroke.model.published.storage import Storage, StorageOf, Stored, StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.codes import Codes

MAX_STATE_BYTES = 4096
_ABSMAX, _MAP = ".weight.absmax", ".weight.quant_map"
_NESTED_ABSMAX, _NESTED_MAP = ".weight.nested_absmax", ".weight.nested_quant_map"


@dataclass(frozen=True)
class FourBits(Storage):
    """``weight`` (n·k/2, 1) holds two codes a byte, the first in its high half, counted row by row; ``weight.quant_map`` the 16
    numbers that they stand for, ``weight.absmax`` a factor for each block. ``nested``: those factors are codes themselves."""

    kind: Literal["nf4", "fp4"] = "nf4"
    nested: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind.upper()}, blocks with {'a code for their scale' if self.nested else 'a scale'}"

    @property
    def _state(self) -> str:
        return f".weight.quant_state.bitsandbytes__{self.kind}"

    @property
    def timed_as(self) -> str:
        return f"bitsandbytes, {self.kind}"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        half = -(-n * k // 2)
        found = (
            Stored(".weight", ((half, 1), (1, half)), ("U8",)),
            Stored(_ABSMAX, (), ("U8",) if self.nested else ("F32",)),
            Stored(_MAP, ((16,),), ("F32",)),
            Stored(self._state, (), ("U8",)),
        )
        nested = (Stored(_NESTED_ABSMAX, (), ("F32",)), Stored(_NESTED_MAP, ((256,),), ("F32",)))
        return (*found, *nested) if self.nested else found

    def scheme(self, k: int) -> str | None:
        return None

    def read(self, matrix: StoredMatrix) -> Tensor:
        import torch

        n, k, state = matrix.n, matrix.k, self._settings(matrix)
        n_blocks = -(-n * k // state["blocksize"])
        factors = matrix[_ABSMAX]
        if factors.shape != (n_blocks,):
            raise matrix.error(f"'absmax' must have {n_blocks} scales, one for each block of {state['blocksize']},")
        if self.nested:
            count = -(-n_blocks // state["nested_blocksize"])
            outer = matrix.scales(_NESTED_ABSMAX)
            if outer.shape != (count,):
                raise matrix.error(f"'nested_absmax' must have {count} scales")
            spread = outer.repeat_interleave(state["nested_blocksize"])[:n_blocks]
            factors = matrix.scales(_NESTED_MAP)[factors.int()] * spread + state["nested_offset"]
        else:
            factors = matrix.scales(_ABSMAX)
        packed = matrix[".weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[: n * k]
        values = matrix.scales(_MAP)[codes.int()]
        padded = torch.nn.functional.pad(values, (0, n_blocks * state["blocksize"] - n * k))
        return (padded.view(n_blocks, -1) * factors[:, None]).flatten()[: n * k].view(n, k)

    def _settings(self, matrix: StoredMatrix) -> dict[str, Any]:
        """The JSON in the bytes of ``quant_state``, checked."""
        raw, what = matrix[self._state], f"'quant_state.bitsandbytes__{self.kind}'"
        text, place = bytes(raw[:MAX_STATE_BYTES].tolist()), matrix.files.directory
        state = parse_json(text, f"{place}: {what} of {matrix.module!r}", Allowance(place, len(text)))
        sizes = ("blocksize", "nested_blocksize") if self.nested else ("blocksize",)
        numbers = ("nested_offset",) if self.nested else ()
        most = matrix.n * matrix.k + 2**16
        if (
            not isinstance(state, dict)
            or not all(is_integer(state.get(key)) and 0 < state[key] <= most for key in sizes)
            or not all(is_number(state.get(key)) for key in numbers)
        ):
            raise matrix.error(f"{what} must have {', '.join((*sizes, *numbers))}")
        return state


@dataclass(frozen=True)
class Int8(Storage):
    """``weight`` (n, k) in int8 and ``SCB`` (n), the largest of each output, which code 127 stands for. LLM.int8() computes
    large inputs in 16 bits; here all are rounded alike."""

    @property
    def label(self) -> str:
        return "int8, one scale an output"

    @property
    def timed_as(self) -> str:
        return "int8"

    def tensors(self, n: int, k: int) -> tuple[Stored, ...]:
        return (
            Stored(".weight", ((n, k),), ("I8",)),
            Stored(".SCB", ((n,),), ("F32",)),
            Stored(".weight_format", ((), (1,)), ("U8",), optional=True),
        )

    def scheme(self, k: int) -> str | None:
        return "int8"

    def read(self, matrix: StoredMatrix) -> Codes:
        from twostroke.kernels.codes import Codes

        if ".weight_format" in matrix and int(matrix[".weight_format"]) != 0:
            raise matrix.error("'weight_format' must be 0, for rows,")
        largest = matrix.scales(".SCB")
        if not bool((largest >= 0).all()):
            raise matrix.error("scales 'SCB' must not be negative")
        return Codes(matrix[".weight"], largest.masked_fill(largest == 0, 127.0) / 127.0)


def storage_of(quantised: dict[str, Any]) -> StorageOf:
    """``quantization_config`` with ``quant_method`` "bitsandbytes"."""
    read = Reader(quantised)
    storage: Storage
    if read.flag("load_in_8bit", False):
        storage = Int8()
    elif read.flag("load_in_4bit", False):
        kind, held = quantised.get("bnb_4bit_quant_type", "fp4"), quantised.get("bnb_4bit_quant_storage") or "uint8"
        if kind not in ("nf4", "fp4") or held != "uint8":
            raise ConfigError(
                f"quantization_config of method 'bitsandbytes' with {kind!r:.50} in {held!r:.50} is not supported. "
                "Supported: nf4 and fp4 in uint8."
            )
        storage = FourBits(kind, read.flag("bnb_4bit_use_double_quant", False))
    else:
        raise ConfigError("quantization_config of method 'bitsandbytes' must say load_in_4bit or load_in_8bit.")
    left_out = named((*listed(quantised, "llm_int8_skip_modules"), "lm_head"))
    return lambda module: None if left_out(module) else storage


METHOD = BITSANDBYTES
EXAMPLES = (FourBits("nf4"), FourBits("nf4", True), FourBits("fp4"), Int8())
