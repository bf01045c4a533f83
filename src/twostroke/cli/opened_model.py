"""A model as people name it: a directory, the output of a training run, or a GGUF file, which is imported once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from twostroke.cli.console import log, progress
from twostroke.core.errors import DataError
from twostroke.core.paths import imported_dir, model_directory
from twostroke.core.units import format_bytes


def opened_model(model: Path) -> Path:
    """The directory of ``model``. Of a GGUF file the copy that an earlier command made, if none of its parts has changed since,
    else a new one in its place. Raises DataError, and the errors of ``import_model``."""
    if not _is_gguf(model):
        if model.is_file():
            raise DataError(
                f"model {model} is neither a model directory nor a GGUF file: it does not begin as those do. "
                "`twostroke import` makes a directory of other files."
            )
        return model_directory(model)
    from twostroke.interop.gguf_parts import names_of_parts

    file = model.absolute()  # links stay: the Hub's cache gives the files that they lead to names of their own
    parts = [part for name in names_of_parts(file.name) if (part := file.with_name(name)).is_file()]
    states = [(each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in map(Path.stat, parts)]
    state = " ".join(str(number) for each in states for number in each)
    folder = imported_dir() / hashlib.sha256(str(file).encode(errors="surrogateescape")).hexdigest()[:32]
    directory, mark = folder / file.stem, folder / "source"
    if mark.is_file() and mark.read_text(encoding="utf-8") == state and (directory / "config.json").is_file():
        return directory
    from twostroke.interop.import_model import import_model

    folder.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    with progress(f"importing {model}", 1.0) as advance:
        report = import_model(file, directory, replace=True, progress=advance)
    mark.write_text(state, encoding="utf-8")
    log(f"{model} was imported to {directory} ({format_bytes(report.n_bytes)}), which may be removed.")
    for note in report.notes:
        log(note)
    return directory


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    from twostroke.interop.gguf import MAGIC

    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC
