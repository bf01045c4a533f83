"""Compiles the native library: every ``.cpp`` beside this file, each with the flags its name asks for, into one shared library.

Standard library only, and loaded by path from ``setup.py``, which runs where nothing is installed. A file named
``*_avx512.cpp`` is compiled for AVX-512 with VNNI, and so on (``FLAGS``); such files hold nothing that runs before
the processor was asked. Objects are kept under the hash of what they were made from, so that a rebuild compiles what changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY_NAME = "_native.so"
# No contraction: a·b + c is rounded twice where it is written so, on every instruction set alike.
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=default",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic-functions")
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "_avx2": AVX2,
        "_avxvnni": (*AVX2, "-mavxvnni"),
        "_avx512": AVX512,
        "_avx512bf16": (*AVX512, "-mavx512bf16"),
        "_amx": (*AVX512, "-mavx512bf16"),  # tiles are written as instructions
    },
    "aarch64": {"_neon": ("-march=armv8.2-a+dotprod",), "_neonbf16": ("-march=armv8.2-a+dotprod+i8mm+bf16",)},
}
"""By machine, as the compiler calls it, and by the last part of a file's name."""


class BuildError(Exception):
    """No compiler, or it refused; the text says which and holds the compiler's words."""


def compiler() -> list[str]:
    """The C++ compiler's command: ``CXX`` where it is set, else g++, else c++. Raises BuildError where there is none."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for candidate in [wanted] if wanted else [["g++"], ["c++"]]:
        if shutil.which(candidate[0]):
            return candidate
    missing = shlex.join(wanted) if wanted else "g++ or c++"
    raise BuildError(f"no C++ compiler: {missing} was not found. Install one (Debian: apt-get install g++).")


def machine() -> str:
    """What the compiler compiles for, a key of ``FLAGS`` if files of that machine's own are there. Raises BuildError."""
    name = _run([*compiler(), "-dumpmachine"]).strip().partition("-")[0]
    return {"amd64": "x86_64"}.get(name, name)


def sources(machine: str = "") -> list[Path]:
    """The files that a library for ``machine`` is made of; all of them without one."""
    others = {suffix for other, flags in FLAGS.items() if machine not in ("", other) for suffix in flags}
    return [path for path in sorted(FOLDER.glob("*.cpp")) if _suffix(path) not in others]


def sources_hash() -> str:
    """Of all sources and headers and of the flags: a library that was built from others is not used."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, FLAGS, LINK_FLAGS)).encode())
    for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def build(target: Path, flags_of: Mapping[str, tuple[str, ...]] | None = None) -> Path:
    """Write the library to ``target``, in one step, so that no program loads half of it. Raises BuildError.

    ``flags_of``: further flags for files by their stem, "" for all of them and the linker: sanitizers, emulated tiles.
    """
    flags_of = flags_of or {}
    with object_folder() as folder:
        objects = compile_sources(folder, flags_of)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            _run([*compiler(), *flags_of.get("", ()), *LINK_FLAGS, *map(str, objects.values()), "-o", str(partial)])
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        _forget_old_objects(folder, keep=set(objects.values()))
    return target


def compile_sources(folder: Path, flags_of: Mapping[str, tuple[str, ...]] | None = None) -> dict[Path, Path]:
    """The object in ``folder`` of each source, made where none of the same source and flags is there. Raises BuildError."""
    command = compiler()
    own_flags, found = FLAGS.get(machine(), {}), sources(machine())
    flags_of = flags_of or {}
    headers = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.h")))).hexdigest()
    stamp = f'-DTS_SOURCES="{sources_hash()}"'

    def compile_one(source: Path) -> Path:
        flags = [*COMMON_FLAGS, *own_flags.get(_suffix(source), ()), *flags_of.get("", ()), *flags_of.get(source.stem, ())]
        if b"TS_SOURCES" in source.read_bytes():
            flags.append(stamp)
        key = hashlib.sha256(repr((command, flags, headers, source.name)).encode() + source.read_bytes()).hexdigest()[:32]
        made = folder / f"{key}.o"
        if not stat.S_ISREG(_mode_of(made)):
            partial = folder / f"{key}.{os.getpid()}.part.o"
            _run([*command, *flags, "-c", str(source), "-o", str(partial)])
            partial.replace(made)
        return made

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return dict(zip(found, pool.map(compile_one, found), strict=True))


@contextmanager
def object_folder() -> Iterator[Path]:
    """Where objects are kept: in ``$TWOSTROKE_HOME`` or ``~/.twostroke``, if no other user can have put one there.

    What is linked is run: a link, another user's folder, or one that others may write is left alone, and this build's objects
    have a new folder of their own."""
    try:
        home = Path(os.environ.get("TWOSTROKE_HOME") or Path.home() / ".twostroke")
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = home / "objects"
        folder.mkdir(mode=0o700, exist_ok=True)
        ours = _is_ours(home.resolve()) and _is_ours(folder)
    except (OSError, RuntimeError):  # no home, or it cannot be written
        ours = False
    if ours:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="twostroke-objects-") as made:
        yield Path(made)


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder, and not a link to one, that belongs to this user and that no other may write."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _mode_of(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def _suffix(source: Path) -> str:
    return "_" + source.stem.rpartition("_")[2]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"`{shlex.join(command)}` failed:\n{done.stderr.strip()[-4000:]}")
    return done.stdout


def _forget_old_objects(folder: Path, keep: set[Path], at_most: int = 200) -> None:
    """Of what earlier builds left, the oldest go; a file of another name is not ours."""
    own = [
        path for path in folder.iterdir() if re.fullmatch(r"[0-9a-f]{32}(\.[0-9]+\.part)?\.o", path.name) and path not in keep
    ]
    others = sorted(own, key=lambda path: path.lstat().st_mtime)
    for path in others[: max(0, len(others) - at_most)]:
        path.unlink(missing_ok=True)
