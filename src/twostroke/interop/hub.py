"""Downloads models by their name on the Hugging Face Hub: a model directory, or one GGUF file of it with all its parts."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from twostroke.core.errors import ConfigError, CorruptFileError, InputError, TwostrokeError
from twostroke.interop.gguf_parts import names_of_parts

WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["original/*", "onnx/*", "openvino/*", "runs/*"]
GGUF = ".gguf"
MOST_NAMED = 12

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([^\s@:]+))?(?::([^\s:]+))?")
_SIDE_FILES = ("mmproj", "imatrix")
"""How GGUF files begin that are no language models: projections of pictures, statistics of a quantiser."""
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubName:
    """``owner/name@revision:gguf``. ``revision`` is a branch, a tag or a commit (None: the main branch), ``gguf`` a file of
    the repository in GGUF, or the type of its weights that one is named by (None: the model directory is meant)."""

    repository: str
    revision: str | None = None
    gguf: str | None = None


def hub_name(source: str, revision: str | None = None) -> HubName | None:
    """``source`` as a name on the Hub, at ``revision``; None if it is none. What ends like a model file is taken for a misspelt
    path. Raises ConfigError for two revisions."""
    found = _NAME.fullmatch(source)
    if found is None or found[1].endswith((GGUF, ".bin", ".safetensors")):
        return None
    if revision is not None and found[2] not in (None, revision):
        raise ConfigError(f"{source} names the revision {found[2]!r}, and {revision!r} is asked for. Give one of them.")
    return HubName(found[1], revision or found[2], found[3])


def download(name: HubName) -> Path:
    """The model directory ``name``, or its GGUF file (the first of its parts), downloaded or from the cache. Code and pickles
    are not downloaded. What an interrupted call has downloaded, the next one does not download again.

    Raises InputError if the Hub does not have it or refuses it, CorruptFileError for files that are not what the Hub has,
    TwostrokeError if it cannot be reached.
    """
    if name.gguf is not None:
        chosen = _chosen(name, _gguf_files(name))
        return _snapshot(name, [glob.escape(file) for file in chosen]) / chosen[0]
    directory = _snapshot(name, WANTED, UNWANTED)
    if not any((directory / file).is_file() for file in ("config.json", "adapter_config.json")):
        files = _gguf_files(name)
        if files:
            raise InputError(
                f"{name.repository} has no config.json, but GGUF files: {_listed(files)}. Name one by its type or file, as "
                f"{name.repository}:Q4_K_M."
            )
    return directory


def _snapshot(name: HubName, wanted: list[str], unwanted: list[str] | None = None) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    if not sys.stderr.isatty():  # in a log, each redrawing of the bar would be a line
        huggingface_hub.utils.disable_progress_bars()
    with _sentences(name):
        directory = Path(
            huggingface_hub.snapshot_download(
                name.repository, revision=name.revision, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
    files = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    for file in filter_repo_objects(files, allow_patterns=wanted, ignore_patterns=unwanted):
        _require_same(name, directory / file)
    return directory


def _require_same(name: HubName, file: Path) -> None:
    """Raises CorruptFileError where the content of ``file`` has another hash than the Hub gave. The Hub's cache links to files
    whose names are these hashes: SHA-256 of large files, Git's of small ones."""
    if not file.is_symlink():
        return
    wanted = PurePosixPath(os.readlink(file)).name
    with file.open("rb") as stream:
        if _SHA256.fullmatch(wanted):
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        elif _GIT_SHA1.fullmatch(wanted):
            content = stream.read()
            found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        else:
            return
    if found != wanted:
        raise CorruptFileError(
            f"{file.name} of {name.repository} is damaged: its hash is {found}, and the Hub's is {wanted}. Remove "
            f"{file.parent / os.readlink(file)} and import again."
        )


def _gguf_files(name: HubName) -> list[str]:
    """Those of the repository; where the Hub cannot be reached, those in the cache."""
    import huggingface_hub
    from huggingface_hub import errors

    with _sentences(name):
        try:
            files: Iterable[str] = huggingface_hub.HfApi().list_repo_files(name.repository, revision=name.revision)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except _unreachable():
            found = huggingface_hub.snapshot_download(
                name.repository, revision=name.revision, allow_patterns=[], local_files_only=True
            )
            files = (path.relative_to(found).as_posix() for path in Path(found).rglob("*"))
        return sorted(file for file in files if file.endswith(GGUF))


def _chosen(name: HubName, files: list[str]) -> tuple[str, ...]:
    """The file of ``files`` that ``name`` means, or all its parts. Raises InputError, saying which there are."""
    gguf = name.gguf or ""
    found = {names_of_parts(file)[0] for file in files if (file == gguf if gguf.endswith(GGUF) else _is_of_type(file, gguf))}
    if len(found) > 1:
        raise InputError(
            f"{gguf!r} is said of {len(found)} GGUF files of {name.repository}: {_listed(found)}. Name one of them, as "
            f"{name.repository}:{min(found)}."
        )
    if not found:
        there = f"It has {_listed(files)}" if files else "It has no GGUF files at all"
        raise InputError(f"{name.repository} has no GGUF file {gguf!r}. {there}.")
    parts = names_of_parts(found.pop())
    missing = [part for part in parts if part not in files]
    if missing:
        raise InputError(f"{name.repository} has not all {len(parts)} parts of {parts[0]}: {missing[0]} is missing there.")
    return parts


def _is_of_type(file: str, kind: str) -> bool:
    """Whether ``file`` ends in ``-kind.gguf``, its number as a part aside, or lies in a folder of that name."""
    path = PurePosixPath(file)
    if path.name.startswith(_SIDE_FILES):
        return False
    stem = re.sub(r"-[0-9]{5}-of-[0-9]{5}$", "", path.stem)
    in_name = re.search(rf"(?:^|[-._]){re.escape(kind)}$", stem, re.IGNORECASE)
    return in_name is not None or path.parent.name.casefold() == kind.casefold()


def _listed(files: Iterable[str]) -> str:
    firsts = sorted({names_of_parts(file)[0] for file in files})
    return ", ".join(firsts[:MOST_NAMED]) + (f" and {len(firsts) - MOST_NAMED} more" if len(firsts) > MOST_NAMED else "")


def _unreachable() -> tuple[type[Exception], ...]:
    """What a failed connection raises: OSErrors, and of some calls the errors of the HTTP client itself."""
    from huggingface_hub import errors

    client = errors.HfHubHTTPError.__mro__[1]  # httpx's, under whichever name a release imports it
    return OSError, client


@contextmanager
def _sentences(name: HubName) -> Iterator[None]:
    """Turns what the Hub's client raises into sentences."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise InputError(
            f"the Hub gives {name.repository} only to those who accept its terms. Accept them there, and log in with "
            "`hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"the Hub has no model {name.repository!r} that you may read. Check the name, or log in with `hf auth login`."
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{name.repository} has no revision {name.revision!r} on the Hub. {_revisions(name)}") from None
    except errors.HFValidationError as error:
        raise InputError(f"{name.repository!r} is neither a path that exists nor a Hub name: {error}.") from None
    except _unreachable() as error:
        # Most have pages of explanation: the first line says enough.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TwostrokeError(
            f"{name.repository!r} is not a path that exists, and as a Hub name it could not be downloaded ({reason:.200}). The "
            "same command goes on where this one stopped. "
            "Offline, give the path of a model directory, a GGUF file or a llama2.c file."
        ) from None


def _revisions(name: HubName) -> str:
    """A sentence on the revisions that there are."""
    import huggingface_hub

    try:
        refs = huggingface_hub.HfApi().list_repo_refs(name.repository)
    except _unreachable():
        return "Give a branch, a tag or a commit of it."
    named = [ref.name for ref in (*refs.branches, *refs.tags)]
    rest = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"It has {', '.join(named[:MOST_NAMED])}{rest}, and any of its commits."
