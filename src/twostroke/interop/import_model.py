"""Imports a model from any supported source, and writes a Hugging Face directory that this package and others open."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from torch import Tensor

from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import layout
from twostroke.interop.gguf import MAGIC as GGUF_MAGIC
from twostroke.interop.gguf_model import read_gguf
from twostroke.interop.held import held_by
from twostroke.interop.hub import download, hub_name
from twostroke.interop.llama2c import read_llama2c
from twostroke.interop.moved import Held, Made, cast, new_memory, words_of
from twostroke.interop.peft import read_peft
from twostroke.interop.source import SourceModel, SourceTokenizer
from twostroke.model.adapter_directory import is_adapter_directory
from twostroke.model.load import load_state
from twostroke.model.save import bytes_of_files, bytes_to_save, require_finite, save_model, write_tokenizer_tables

_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class ImportReport:
    """What an import made. ``dtype`` is GGUF's most frequent type where matrices stay as they are. ``tokenizer`` says where the
    tokenizer came from; None if the source has no tokenizer."""

    source: str
    kind: str
    directory: str
    family: str
    n_parameters: int
    n_bytes: int
    dtype: str
    tokenizer: str | None
    notes: tuple[str, ...]


def import_model(
    source: str | Path,
    directory: str | Path,
    tokenizer: str | Path | None = None,
    dtype: str = "auto",
    replace: bool = False,
    progress: Callable[[float, str], None] | None = None,
    revision: str | None = None,
) -> ImportReport:
    """Read ``source`` and write it to ``directory`` in Hugging Face layout.

    ``source`` is a llama2.c ``.bin``, a GGUF file or any of its parts, a Hugging Face directory or a Hub name; its content
    decides which. ``owner/name@revision`` is a Hub name at a branch, tag or commit, as with ``revision``;
    ``owner/name:Q4_K_M`` and ``owner/name:FILE.gguf`` mean a GGUF file there.
    ``tokenizer`` replaces the source's own. It is a llama2.c ``tokenizer.bin``, a ``tokenizer.json`` or a directory with one.
    ``dtype`` "auto" keeps every weight exactly, so it is fp32 if formats are mixed. The blocks' quantised matrices of a GGUF
    file stay as they are (``model.published.gguf``) if our engine computes with the codes of any; other quantised weights are
    rounded to bf16.
    ``progress`` is called with the share of tensors done, 0 to 1, and a note.

    Raises InputError, ConfigError or CorruptFileError, also for a weight that is not finite, and leaves no partial directory.
    Pickles are never opened.
    """
    return write_import(open_source(source, tokenizer, dtype, revision), directory, replace, progress)


@dataclass(frozen=True)
class Opened:
    """A source of which headers and tokenizer were read: what it is called, the model, the format to store it in, the tokenizer
    that replaces its own, and what is said of it."""

    name: str
    model: SourceModel
    dtype: str
    tokenizer: Path | None
    notes: tuple[str, ...]


def open_source(
    source: str | Path, tokenizer: str | Path | None = None, dtype: str = "auto", revision: str | None = None
) -> Opened:
    """``source`` and what ``import_model`` makes of it, whose errors it raises, but for those of weights. What is on the Hub is
    downloaded."""
    if dtype not in ("auto", "fp32", "bf16", "fp16"):
        raise ConfigError(f"dtype={dtype!r} is not a format to save in. Use auto, fp32, bf16 or fp16.")
    chosen = Path(tokenizer).expanduser() if tokenizer is not None else None
    if chosen is not None and not chosen.exists():
        raise InputError(f"tokenizer {chosen} does not exist. Give a tokenizer.json, a tokenizer.bin or a folder with one.")
    model = _read(source, chosen, dtype, revision)
    if chosen is not None and model.kind == "llama2.c" and chosen.is_file() and chosen.suffix == ".bin":
        chosen = None  # it was read with the model
    stored = model.auto or model.dtype if dtype == "auto" else dtype
    notes = list(model.notes)
    if model.codes is not None:
        notes.append(f"embedding and head, where they were quantised, were rounded to {stored}.")
    elif stored != model.dtype and stored != "fp32":
        remedy = f" --dtype {model.dtype} keeps them exactly." if dtype == "auto" else ""
        notes.append(f"weights were rounded from {model.dtype} to {stored}.{remedy}")
    if chosen is None and model.tokenizer is None:
        notes.append("the source has no tokenizer; give one with --tokenizer to generate and score text.")
    return Opened(str(source), model, stored, chosen, tuple(notes))


def expect_import(opened: Opened) -> tuple[Held, Made]:
    """What ``write_import`` will read and write. No weight is read."""
    model, dtype = opened.model, opened.dtype
    files = opened.tokenizer or model.tokenizer
    if isinstance(files, SourceTokenizer):
        tokenizer_bytes = len(files.tokenizer.to_str().encode()) + bytes_of_files([files.config])
    else:
        tokenizer_bytes = bytes_of_files((), files)
    kept = {} if model.codes is None else model.codes.shapes
    read = {e.canonical for e in layout(model.spec) if any(part.name not in kept for part in e.parts)}
    held = replaced(model.held, tensors={name: one for name, one in model.held.tensors.items() if name in read})
    changed, kept_bytes = cast(held, dtype), [math.prod(shape) for shape in kept.values()]
    n_bytes = bytes_to_save(model.spec, dtype, tokenizer_bytes, model.codes)
    most = max([0.0, *changed, *(2.0 * size for size in kept_bytes)])
    return held, Made(n_bytes, words_of(files, model.spec), 0, new_memory([*changed, *kept_bytes]), most)


def write_import(
    opened: Opened, directory: str | Path, replace: bool = False, progress: Callable[[float, str], None] | None = None
) -> ImportReport:
    """Write what was opened to ``directory``; the rest of ``import_model``."""
    model, chosen, stored, kept = opened.model, opened.tokenizer, opened.dtype, opened.model.codes
    with tempfile.TemporaryDirectory(prefix="twostroke-import-") as scratch:
        files: Path | None = None
        origin: str | None = None
        if chosen is not None:
            files, origin = chosen, str(chosen)
        elif isinstance(model.tokenizer, SourceTokenizer):
            files, origin = Path(scratch), f"the tables of the {model.kind} model"
            write_tokenizer_tables(model.tokenizer.tokenizer, model.spec, files, model.tokenizer.config)
        elif model.tokenizer is not None:
            files, origin = model.tokenizer, str(model.tokenizer)
        state = CheckedState(model.state, progress)
        save_model(state, model.spec, directory, stored, tokenizer_path=files, replace=replace, kept=kept)
    shapes = [entry.shape for entry in layout(model.spec)]
    n_parameters = sum(math.prod(shape) for shape in shapes)
    n_bytes = sum(file.stat().st_size for file in Path(directory).iterdir())
    held = stored if kept is None else Counter(kept.kinds.values()).most_common(1)[0][0]
    return ImportReport(
        opened.name, model.kind, str(directory), model.spec.family, n_parameters, n_bytes, held, origin, opened.notes
    )


class CheckedState(Mapping[str, Tensor]):
    """A state that reports each read tensor to ``progress``, and raises CorruptFileError if one is not finite."""

    def __init__(self, state: Mapping[str, Tensor], progress: Callable[[float, str], None] | None) -> None:
        self._state, self._progress, self._taken = state, progress, 0

    def __getitem__(self, name: str) -> Tensor:
        self._taken += 1
        if self._progress is not None:
            self._progress(min(1.0, self._taken / len(self._state)), f"tensor {self._taken} of {len(self._state)}")
        return require_finite(name, self._state[name])

    def __contains__(self, name: object) -> bool:  # Mapping's own would take the tensor
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _read(source: str | Path, tokenizer: Path | None, dtype: str, revision: str | None) -> SourceModel:
    path = Path(source).expanduser()
    if revision is not None and path.exists():
        raise ConfigError(f"revision={revision!r} is of a model on the Hub, and {path} is a path that exists. Leave it out.")
    if path.is_dir():
        return _read_directory(path)
    if path.is_file():
        return _read_file(path, tokenizer, dtype)
    name = hub_name(source, revision) if isinstance(source, str) else None
    if name is not None:
        found = download(name)
        return _read_directory(found) if found.is_dir() else _read_file(found, tokenizer, dtype)
    raise InputError(
        f"{path} does not exist, and is not a Hub name of the form owner/name, owner/name@revision or owner/name:Q4_K_M. Check "
        "the path."
    )


def _read_file(path: Path, tokenizer: Path | None, dtype: str) -> SourceModel:
    with path.open("rb") as stream:
        start = stream.read(8)
    if start.startswith(GGUF_MAGIC):
        return read_gguf(path, dtype)
    if start.startswith(_PICKLES):
        raise InputError(
            f"{path} is a pickle, which may run code and is never opened. Convert it to safetensors where it is trusted."
        )
    if path.suffix == ".safetensors":
        raise InputError(f"{path} is one file of a model directory. Give the directory, which has the config.json as well.")
    if path.suffix == ".bin":
        given = tokenizer if tokenizer is not None and tokenizer.is_file() and tokenizer.suffix == ".bin" else None
        return read_llama2c(path, given or (_tokenizer_beside(path) if tokenizer is None else None))
    raise CorruptFileError(
        f"{path} is neither GGUF (it does not begin with GGUF) nor a llama2.c .bin file. Give one of those or a directory."
    )


def _tokenizer_beside(path: Path) -> Path | None:
    """The tokenizer beside a llama2.c model: ``tok<vocabulary>.bin`` if the model has its own, else ``tokenizer.bin``."""
    with path.open("rb") as stream:
        header = stream.read(28)
    vocab_size = abs(int.from_bytes(header[20:24], "little", signed=True))
    candidates = [path.parent / f"tok{vocab_size}.bin", path.parent / "tokenizer.bin"]
    return next((file for file in candidates if file.is_file()), None)


def _read_directory(directory: Path) -> SourceModel:
    if is_adapter_directory(directory):
        return read_peft(directory)
    spec, state = load_state(directory)
    held = held_by(directory)
    tokenizer = directory if (directory / "tokenizer.json").is_file() else None
    return SourceModel("Hugging Face", spec, state, held.dtype, held, tokenizer, spec.notes)
