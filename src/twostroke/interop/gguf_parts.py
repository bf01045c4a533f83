"""Opens a GGUF model of one file or of several, as llama.cpp's llama-gguf-split leaves it: the first part has all metadata."""

from __future__ import annotations

import re
from pathlib import Path

from twostroke.core.errors import CorruptFileError, InputError
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_metadata import Metadata

_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def names_of_parts(name: str) -> tuple[str, ...]:
    """The files of the model that a file called ``name`` is part of, in order: ``name`` alone unless it is like
    ``model-00001-of-00003.gguf``."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return (name,)
    return tuple(f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1))


def open_gguf(path: Path) -> GgufFile:
    """The file ``path``, with the tensors of all parts where it is one of them.

    Raises InputError where parts are missing, CorruptFileError where they are not those of one model.
    """
    file = GgufFile(path)
    n_parts = Metadata(file).integer("split.count", 0)
    if n_parts <= 1:
        return file
    paths = [path.with_name(name) for name in names_of_parts(path.name)]
    if len(paths) != n_parts:
        raise InputError(
            f"{path} is one of {n_parts} parts by its metadata, and one of {len(paths)} by its name. Give the parts the names "
            f"that they were published under, as model-00001-of-{n_parts:05}.gguf."
        )
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise InputError(
            f"{path} is one of {n_parts} parts, of which {len(missing)} are not beside it: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}. Download them into the same folder."
        )
    parts = [file if each == path else GgufFile(each) for each in paths]
    whole = parts[0]
    for number, part in enumerate(parts):
        metadata = Metadata(part)
        said = metadata.integer("split.no"), metadata.integer("split.count")
        if said != (number, n_parts):
            raise CorruptFileError(
                f"{part.path} is part {number + 1} of {n_parts} by its name, but its metadata say split.no={said[0]}, which "
                f"begins at 0, and split.count={said[1]}. It belongs to another model or was renamed; download it again."
            )
        twice = whole.tensors.keys() & part.tensors.keys() if part is not whole else set()
        if twice:
            raise CorruptFileError(
                f"{part.path}: tensor {min(twice)!r:.80} is in an earlier part too. The parts are not those of one model; "
                "download them again."
            )
        whole.tensors.update(part.tensors)
    for part in parts:
        count = Metadata(part).integer("split.tensors.count", len(whole.tensors))
        if count != len(whole.tensors):
            raise CorruptFileError(
                f"{part.path}: metadata split.tensors.count={count}, but its {n_parts} parts hold {len(whole.tensors)} "
                "tensors. The parts are not those of one model; download them again."
            )
    return whole
