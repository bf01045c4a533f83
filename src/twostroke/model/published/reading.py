"""The weights of a quantised directory: every tensor is checked before one is read, then come codes or numbers, a matrix at a
time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.families import layout, read_config, read_spec
from twostroke.core.families.weights import Entry, Part
from twostroke.core.schemes import SCHEMES
from twostroke.core.units import format_bytes
from twostroke.kernels.codes import Codes
from twostroke.model.families import held_order, is_recomputed, stored_name
from twostroke.model.published.registry import Holding, holding, module_name, storage_of, storages
from twostroke.model.published.storage import FLOATS, Storage, Stored, StoredMatrix
from twostroke.model.safetensors_file import TensorInfo, WeightFiles

IGNORED = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale", ".output_scale",
    ".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".attn_q_scale", ".attn_k_scale", ".attn_v_scale",
)  # fmt: skip
"""Ends of tensors about activations and caches, which engines here round in their own way."""


class QuantisedWeights:
    """The tensors of ``directory``, whose ``config.json`` has a ``quantization_config``.

    Raises InputError (no model there), ConfigError (a configuration that is not read) and CorruptFileError (a tensor that is
    missing, unexpected, of another shape or type, or stands for no matrix; of contents when they are read).
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        config = read_config(directory)
        of = storage_of(config)
        assert of is not None, "the directory is not quantised"
        self.method = str(config["quantization_config"]["quant_method"])
        spec = read_spec(directory)
        self.entries = {entry.canonical: entry for entry in layout(spec)}
        self.holding: Holding = holding(list(self.entries.values()), of)
        self.files = WeightFiles(directory)
        self._matrices: dict[str, tuple[Storage, StoredMatrix]] = {}  # by the stored name of a plain weight
        self.spec = spec
        expected: set[str] = set()
        for entry in self.entries.values():
            for part, storage in zip(entry.parts, storages(entry, of), strict=True):
                expected |= self._plain(entry, part) if storage is None else self._quantised(entry, part, storage)
        self._refuse_unexpected(expected)
        stored = sum(info.n_bytes for info in self.files.infos.values())
        self.note = (
            f"{self.directory.name} holds {self.method} weights ({'; '.join(self.holding.labels)}), {format_bytes(stored)} "
            f"on disk. Our engine holds the blocks' matrices in {self.holding.scheme or 'bf16'}, "
            f"{format_bytes(self._bytes(True))} with the rest; as the plain bf16 numbers that they stand for they take "
            f"{format_bytes(self._bytes(False))}. What rounding lost stays lost."
        )
        self.spec = spec.with_(notes=(*spec.notes, self.note))

    def _bytes(self, in_codes: bool) -> float:
        """Of the model in memory: the blocks' matrices in codes where the engine multiplies those, everything else in bf16."""
        total = 0.0
        for name, entry in self.entries.items():
            scheme = self.holding.of(name) if in_codes and entry.matrix is not None else None
            row = SCHEMES[scheme or "bf16"]
            total += row.matrix_bytes(*entry.shape) if row.computes_in_codes else 2 * torch.Size(entry.shape).numel()
        return total

    def get(self, name: str) -> Tensor:
        """The tensor that a plain checkpoint stores as ``name``, in fp32 where it is quantised."""
        if name not in self._matrices:
            return self.files.get(stored_name(self.spec, name, self.files.infos))
        storage, matrix = self._matrices[name]
        values = finite_values(storage, matrix)
        if matrix.copies > 1:
            values = values.unflatten(0, (matrix.copies, -1))
        return values.mT if matrix.transposed else values

    def stored_as(self, name: str) -> Storage | None:
        """How the tensor that a plain checkpoint stores as ``name`` is stored; None: as plain numbers."""
        return self._matrices[name][0] if name in self._matrices else None

    def codes(self, canonical: str) -> Codes:
        """The codes of a block's matrix that ``holding`` keeps in codes."""
        entry = self.entries[canonical]
        parts: list[Codes] = []
        for part in entry.parts:
            storage, matrix = self._matrices[part.name]
            found = storage.read(matrix)
            assert isinstance(found, Codes)
            if found.codes.dtype is torch.float8_e4m3fn and bool(found.codes.isnan().any()):
                raise matrix.error("weights must be finite")
            parts.append(found)
        whole = [None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        if entry.copies > 1:
            whole = [None if tensor is None else tensor.unflatten(0, (entry.copies, -1)) for tensor in whole]
        codes, scale, zero = (None if tensor is None else held_order(entry, tensor).contiguous() for tensor in whole)
        assert codes is not None
        assert scale is not None
        return Codes(codes, scale, zero)

    def _plain(self, entry: Entry, part: Part) -> set[str]:
        name = stored_name(self.spec, part.name, self.files.infos)
        self._check(name, (entry.stored_shape(part),), FLOATS)
        return {name}

    def _quantised(self, entry: Entry, part: Part, storage: Storage) -> set[str]:
        module, k, names = module_name(part.name), entry.shape[1], {}
        if entry.copies > 1 and not storage.together:
            raise ConfigError(
                f"{self.directory}: the experts of {module!r} are stored as one tensor, which is not read in {self.method}'s "
                f"format ({storage.label}). Start from the unquantised model."
            )
        for stored in storage.tensors(part.rows // entry.copies, k):
            name = stored_name(self.spec, f"{module}{stored.suffix}", self.files.infos)
            if name not in self.files and stored.optional:
                continue
            shapes = (entry.stored_shape(part),) if stored.oriented else _of_copies(stored, entry.copies)
            self._check(name, shapes, stored.tags)
            names[stored.suffix] = name
        matrix = StoredMatrix(self.files, module, part.rows, k, names, entry.transposed, entry.copies)
        self._matrices[part.name] = (storage, matrix)
        return set(names.values())

    def _check(self, name: str, shapes: tuple[tuple[int, ...], ...], tags: tuple[str, ...]) -> None:
        if name not in self.files:
            raise CorruptFileError(f"{self.directory} has no tensor {name!r}, which its config.json asks for.")
        info = self.files.infos[name]
        if info.dtype not in tags or not _fits(info, shapes):
            due = " or ".join(str(list(shape)) for shape in shapes) or "one row"
            raise CorruptFileError(
                f"{self.directory}: tensor {name!r} is {info.dtype} {list(info.shape)}; {'/'.join(tags)} {due} is due."
            )

    def _refuse_unexpected(self, expected: set[str]) -> None:
        for name in sorted(set(self.files) - expected):
            if is_recomputed(self.spec, name) or name.endswith(IGNORED):
                continue
            if name.endswith(".bias") and self._is_zero(name):
                continue  # AutoGPTQ gives every layer a bias, of zeros where the model has none
            raise CorruptFileError(
                f"{self.directory} holds tensor {name!r}, which a {self.method} copy of its model does not have."
            )

    def _is_zero(self, name: str) -> bool:
        return self.files.infos[name].dtype in FLOATS and not bool(self.files.get(name).any())


def _fits(info: TensorInfo, shapes: tuple[tuple[int, ...], ...]) -> bool:
    return info.shape in shapes if shapes else len(info.shape) == 1


def _of_copies(stored: Stored, copies: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of a tensor that holds ``stored`` of several matrices, one after another along a first dimension. What is the same
    for all rows stays one."""
    if copies == 1 or stored.shared:
        return stored.shapes
    return tuple((copies, *shape) for shape in stored.shapes)


def finite_values(storage: Storage, matrix: StoredMatrix) -> Tensor:
    """The numbers (n, k) in fp32 that ``matrix`` stands for. Raises CorruptFileError where one is not finite."""
    found = storage.read(matrix)
    values = found.values() if isinstance(found, Codes) else found
    if not bool(values.isfinite().all()):
        raise matrix.error("weights must be finite")
    return values
