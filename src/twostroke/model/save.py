"""Writes model directories that transformers, vLLM and llama.cpp's converter open."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from twostroke.core.aside import directory_beside, flush_to_disk, take_place
from twostroke.core.dtypes import TORCH_NAMES
from twostroke.core.errors import ConfigError, CorruptFileError, DataError, InputError
from twostroke.core.families import config_from_spec, layout
from twostroke.core.fitted_exits import FITTED_EXITS
from twostroke.core.spec import ModelSpec
from twostroke.data.tokenizer import load_tokenizer, tokenizer_file
from twostroke.model.decoder import Decoder
from twostroke.model.families import write_entry
from twostroke.model.published.gguf import ROWS, KeptRows
from twostroke.model.safetensors_file import INDEX_NAME, SINGLE_NAME, header_of, tensor_bytes

COMPANION_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json",
    "generation_config.json",
)  # fmt: skip
"""Files that are copied beside the weights if the tokenizer comes from a model directory."""

MAX_SHARD_BYTES = 5 * 10**9

PACKED_FOLDER = ".packed"
_PACKED_FILE = re.compile(r"[0-9a-f]{32}\.bin(\.\d+\.partial)?")
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_MODEL_FILES = {
    "config.json", SINGLE_NAME, INDEX_NAME, "adapter_config.json", "adapter_model.safetensors", "twostroke_adapter.json",
    FITTED_EXITS, *COMPANION_FILES,
}  # fmt: skip


def save_model(
    model: Decoder | Mapping[str, Tensor],
    spec: ModelSpec,
    directory: Path | str,
    dtype: str = "fp32",
    tokenizer_path: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    replace: bool = False,
    kept: KeptRows | None = None,
) -> Path:
    """Write ``model``, a decoder or its canonical state, in Hugging Face layout to ``directory``, and return that path. The
    matrices of ``kept`` are stored as those blocks.

    ``tokenizer_path`` is a ``tokenizer.json``, or a directory whose tokenizer files are copied. Everything is written to a new
    directory beside the target, which is then renamed, so that a reader never sees an incomplete model. Memory beside the
    model: one tensor and its parts.

    Raises InputError if ``directory`` is not empty and ``replace`` is not set, ConfigError for a dtype that is not a storage
    format, CorruptFileError if the state lacks a tensor or has one of another shape.
    """
    if dtype not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"dtype={dtype!r} is not a format to save in. Use fp32, bf16 or fp16.")
    target = Path(directory)
    require_writable(target, replace)
    state = model.tensors if isinstance(model, Decoder) else model
    with written_aside(target) as aside:
        fill_directory(
            state, spec, aside, dtype, None if tokenizer_path is None else Path(tokenizer_path), max_shard_bytes, kept
        )
    return target


def fill_directory(
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    directory: Path,
    dtype: str,
    tokenizer_path: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    kept: KeptRows | None = None,
) -> None:
    """Write the canonical ``state`` and its tokenizer to ``directory``, which exists. Raises CorruptFileError for a state that
    is not ``spec``'s, and the errors of ``write_tokenizer``."""
    _check_names(spec, state)
    write_json(directory / "config.json", _config(spec, dtype, kept))
    write_json(directory / "generation_config.json", generation_config(spec))
    _write_state(spec, state, dtype, directory, max_shard_bytes, kept)
    if tokenizer_path is not None:
        write_tokenizer(tokenizer_path, spec, directory)


def _config(spec: ModelSpec, dtype: str, kept: KeptRows | None) -> dict[str, Any]:
    return config_from_spec(spec, TORCH_NAMES[dtype]) | ({} if kept is None else {"quantization_config": kept.config})


def bytes_to_save(spec: ModelSpec, dtype: str, tokenizer_bytes: int, kept: KeptRows | None = None) -> int:
    """Bytes of the directory that ``fill_directory`` will write. ``tokenizer_bytes``: ``bytes_of_tokenizer``."""
    documents = _config(spec, dtype, kept), generation_config(spec)
    return bytes_of_weights(_due(spec, dtype, kept)) + bytes_of_files(documents) + tokenizer_bytes


def bytes_of_weights(due: Due, made_by: str = "pt") -> int:
    """Bytes of the files that ``write_tensors`` makes of ``due``."""
    n_bytes = _sizes(due)
    shards = _shards(n_bytes, MAX_SHARD_BYTES)
    headers = sum(len(header_of({name: due[name] for name in names}, made_by)) for names in shards)
    index = len(_json(_index(shards, sum(n_bytes.values())))) if len(shards) > 1 else 0
    return headers + sum(n_bytes.values()) + index


def bytes_of_files(documents: Iterable[dict[str, Any]], tokenizer: Path | None = None) -> int:
    """Bytes of what ``write_json`` makes of ``documents`` and ``write_tokenizer`` copies of ``tokenizer``. What that one makes
    itself, a ``tokenizer_config.json`` of some 200 bytes, is not counted."""
    return sum(len(_json(document)) for document in documents) + bytes_of_tokenizer(tokenizer)


def bytes_of_tokenizer(source: Path | None) -> int:
    """Bytes of the files that ``write_tokenizer`` copies of ``source``."""
    if source is None:
        return 0
    if not source.is_dir():
        return source.stat().st_size
    own = "generation_config.json"  # takes the place of the one that was made of the spec, of the same size or nearly
    return sum(file.stat().st_size for name in COMPANION_FILES if (file := source / name).is_file() and name != own)


def require_writable(target: Path, replace: bool, others: Collection[str] = ()) -> None:
    """Raise InputError if a model directory must not be written to ``target``: if it is a file, if it is not empty and
    ``replace`` is not set, or if it holds files that Twostroke did not write and replacing it would delete. ``others`` are
    names of files that the target's format has beside those of a model directory."""
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file, and a model is written to a directory. Name a directory.")
    if not target.is_dir():
        return
    found = sorted(target.iterdir())
    if found and not replace:
        raise InputError(f"{target} is not empty. Name a new directory, or replace it with --replace.")
    foreign = [path for path in found if path.name not in others and not _is_written_here(path)]
    if foreign:
        raise InputError(
            f"{target} cannot be replaced: it holds {foreign[0].name!r:.80}, which Twostroke did not write and "
            "would delete. Move it, or name another directory."
        )


def _is_written_here(path: Path) -> bool:
    if path.name == PACKED_FOLDER:  # packed weights that the engine of earlier releases kept here
        return path.is_symlink() or (path.is_dir() and all(_PACKED_FILE.fullmatch(file.name) for file in path.iterdir()))
    return path.is_file() and (path.name in _MODEL_FILES or _SHARD.fullmatch(path.name) is not None)


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A context that yields a new directory ``aside`` to fill. At the end it replaces ``target``.

    Files are flushed to the disk before the rename. An error inside removes ``aside`` and leaves ``target`` as it was. An error
    of safetensors, which it raises for a full disk, becomes an OSError of ``target``. The former content of ``target`` is
    removed; callers check with ``require_writable`` that it may be.
    """
    target = Path(os.path.abspath(target))  # "." has no name of its own
    with directory_beside(target) as aside:
        try:
            yield aside
        except SafetensorError as error:
            raise OSError(errno.EIO, f"cannot be written ({error}); the partial copy was removed", str(target)) from error
        for file in aside.iterdir():
            flush_to_disk(file)
        flush_to_disk(aside)
        take_place(aside, target)


def require_finite(name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor``, the weight ``name``, or raise CorruptFileError if it holds a NaN or an infinity. It takes one pass
    without memory."""
    if not is_finite(tensor):
        raise CorruptFileError(
            f"tensor {name!r} holds values that are not finite. The model is damaged; copy or download it again."
        )
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no number of ``tensor`` is a NaN or an infinity."""
    least, most = torch.aminmax(tensor)  # both are NaN where a weight is; ten times as fast as a sum in fp64
    return math.isfinite(least) and math.isfinite(most)


def _check_names(spec: ModelSpec, state: Mapping[str, Tensor]) -> None:
    expected = [entry.canonical for entry in layout(spec)]
    for name in expected:
        if name not in state:
            raise CorruptFileError(f"the state to save has no tensor {name!r}, which a {spec.family} model of its spec needs.")
    unexpected = sorted(set(state) - set(expected))
    if unexpected:
        raise CorruptFileError(
            f"the state to save holds {unexpected[0]!r}, which a {spec.family} model of its spec does not have."
        )


def write_json(file: Path, document: dict[str, Any]) -> None:
    """``document`` as the file ``file``, indented, in UTF-8."""
    file.write_bytes(_json(document))


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def generation_config(spec: ModelSpec) -> dict[str, Any]:
    """``generation_config.json``: which tokens begin and end a text."""
    config = config_from_spec(spec)
    return {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}


def stored_tensors(
    spec: ModelSpec, state: Mapping[str, Tensor], dtype: str, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(stored name, tensor in ``dtype``) one by one, but for ``without``; rows of a packed matrix share its storage. Raises
    CorruptFileError for a tensor of another shape than ``spec`` asks for."""
    wanted: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    for entry in layout(spec):
        if all(part.name in without for part in entry.parts):
            continue
        tensor = state[entry.canonical]  # a state may read its tensors from a file one by one
        if tuple(tensor.shape) != entry.shape:
            raise CorruptFileError(
                f"tensor {entry.canonical!r} to save has shape {list(tensor.shape)}, but its spec asks for {list(entry.shape)}."
            )
        for name, part in write_entry(entry, tensor):
            if name not in without:
                yield name, part.to("cpu", wanted)


def _write_state(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    dtype: str,
    directory: Path,
    max_shard_bytes: int,
    kept: KeptRows | None,
) -> None:
    shapes = {} if kept is None else kept.shapes
    tensors: Iterator[tuple[str, Tensor | memoryview]] = stored_tensors(spec, state, dtype, shapes)
    if kept is not None:
        tensors = itertools.chain(tensors, ((_rows(name), kept.read(name)) for name in shapes))
    write_tensors(_due(spec, dtype, kept), tensors, directory, max_shard_bytes)


def _rows(name: str) -> str:
    return f"{name.removesuffix('.weight')}{ROWS}"


Due = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor of a file, by stored name."""


def _due(spec: ModelSpec, dtype: str, kept: KeptRows | None) -> Due:
    """Numbers, and behind them the rows of ``kept``: blocks of odd sizes would move numbers from their places."""
    wanted: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    shapes = {} if kept is None else kept.shapes
    parts = {part.name: entry.stored_shape(part) for entry in layout(spec) for part in entry.parts}
    due = {name: (wanted, shape) for name, shape in parts.items() if name not in shapes}
    return due | {_rows(name): (torch.uint8, shape) for name, shape in shapes.items()}


def _sizes(due: Due) -> dict[str, int]:
    return {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in due.items()}


def _shards(n_bytes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file; one larger than ``max_shard_bytes`` is a file of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in n_bytes.items():
        if shards[-1] and held + size > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def write_tensors(
    due: Due,
    tensors: Iterable[tuple[str, Tensor | memoryview]],
    directory: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    made_by: str = "pt",
) -> int:
    """Write ``tensors``, which come in the order of ``due``, to one safetensors file, or to several and their index; returns
    their bytes. A tensor larger than ``max_shard_bytes`` is a shard of its own.

    Memory: one tensor. Where tensors are decoded, the disk takes those before meanwhile. Raises OSError, and ValueError for a
    tensor that is not as ``due`` says.
    """
    n_bytes = _sizes(due)
    shards = _shards(n_bytes, max_shard_bytes)
    pieces = _pieces(due, n_bytes, iter(tensors))
    files = []
    for number, names in enumerate(shards, start=1):
        files.append(directory / f"model-{number:05d}.safetensors")
        header = header_of({name: due[name] for name in names}, made_by)
        _write_flushing(files[-1], itertools.chain([memoryview(header)], itertools.islice(pieces, len(names))))
    total = sum(n_bytes.values())
    _name_shards(files, shards, total)
    return total


def _pieces(due: Due, n_bytes: Mapping[str, int], tensors: Iterator[tuple[str, Tensor | memoryview]]) -> Iterator[memoryview]:
    """The bytes of each tensor, as its header will describe them."""
    for wanted in due:
        name, tensor = next(tensors, ("nothing", memoryview(b"")))
        is_due = not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) == due[wanted]
        piece = tensor_bytes(tensor) if isinstance(tensor, Tensor) else tensor
        if name != wanted or not is_due or piece.nbytes != n_bytes[wanted]:
            raise ValueError(f"{wanted!r} of {due[wanted]} is due, and {name!r} of {piece.nbytes} bytes came.")
        yield piece


_FLUSH_BYTES = 2**26
"""So much is written before the disk is asked to take it while the next tensors are made."""


def _write_flushing(file: Path, pieces: Iterable[memoryview]) -> None:
    """Write ``pieces`` to the new file ``file``; a thread has the disk take what is written. Raises OSError."""
    with file.open("xb") as stream, ThreadPoolExecutor(1) as pool:
        flushing: Future[None] | None = None
        waiting = 0
        for piece in pieces:
            stream.write(piece)
            waiting += len(piece)
            if waiting >= _FLUSH_BYTES and (flushing is None or flushing.done()):
                if flushing is not None:
                    flushing.result()
                stream.flush()
                flushing, waiting = pool.submit(os.fsync, stream.fileno()), 0
        if flushing is not None:
            flushing.result()


def _name_shards(files: Sequence[Path], names: Sequence[Sequence[str]], total_bytes: int) -> None:
    """Give ``files`` the names that readers expect, with an index of the tensors in each where there are several."""
    directory = files[0].parent
    if len(files) == 1:
        files[0].rename(directory / SINGLE_NAME)
        return
    for number, file in enumerate(files, start=1):
        file.rename(directory / _shard_name(number, len(files)))
    write_json(directory / INDEX_NAME, _index(names, total_bytes))


def _shard_name(number: int, n_shards: int) -> str:
    return f"model-{number:05d}-of-{n_shards:05d}.safetensors"


def _index(shards: Sequence[Sequence[str]], total_bytes: int) -> dict[str, Any]:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        weight_map |= dict.fromkeys(names, _shard_name(number, len(shards)))
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}


def write_tokenizer(source: Path, spec: ModelSpec, directory: Path) -> None:
    """Put the tokenizer at ``source`` into ``directory`` so that ``transformers.AutoTokenizer`` opens it.

    If ``source`` is a directory, its tokenizer files are copied. A missing ``tokenizer_config.json`` is made from ``spec``'s
    bos and eos ids. Raises DataError if the tokenizer is missing or does not have those ids, CorruptFileError if it cannot be
    read.
    """
    file = tokenizer_file(source)
    tokenizer = load_tokenizer(file)
    if source.is_dir():
        for name in COMPANION_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    else:
        shutil.copyfile(file, directory / "tokenizer.json")
    if not (directory / "tokenizer_config.json").is_file():
        write_json(directory / "tokenizer_config.json", _tokenizer_config(tokenizer, spec))


def write_tokenizer_tables(tokenizer: Tokenizer, spec: ModelSpec, directory: Path, more: dict[str, Any]) -> None:
    """Write ``tokenizer`` to ``directory``, with ``more`` keys in its ``tokenizer_config.json``. Raises DataError as
    ``write_tokenizer``."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    write_json(directory / "tokenizer_config.json", _tokenizer_config(tokenizer, spec) | more)


def _tokenizer_config(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    for key, token_id in (
        ("bos_token", spec.bos_token_id),
        ("eos_token", spec.eos_token_ids[0] if spec.eos_token_ids else None),
    ):
        if token_id is not None:
            token = tokenizer.id_to_token(token_id)
            if token is None:
                raise DataError(
                    f"the tokenizer has no token {token_id}, which the model names as its {key}. Give the model's tokenizer."
                )
            config[key] = token
    return config
