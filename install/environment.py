"""Makes the virtual environment that ``make`` works in: ``python3 install/environment.py .venv [--extra NAME] ...``.

Says beforehand how much it will download. torch for Linux brings gigabytes of CUDA from PyPI: on a machine without an NVIDIA
device torch alone is taken from ``TORCH_INDEX_URL`` where that is set. Versions are those of ``requirements.lock``, which CI
tested (``--lock ''``: the newest that pyproject.toml admits). An installation that was interrupted is begun again; what it
downloaded is in pip's cache. Standard library only, and readable by any Python 3 up to the line that checks its version.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
OLDEST_PIP = (25, 3)
"""Older ones download what ``--dry-run`` asks about, all of it (observed from 23.2 to 25.2). Debian 12 brings 23.0."""

DEVICES = ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*", "dev/dxg")
"""Where Linux shows an NVIDIA device: the driver's own files, and Windows' device under WSL."""

UNREACHED = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ProxyError", "Network is unreachable", "SSLError")


class InstallError(Exception):
    """A sentence for the person who typed ``make``."""


def check_python() -> None:
    """Raises InstallError where this Python is too old or lacks venv, which Debian packages apart."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        raise InstallError(f"Python 3.11 or newer is needed, and {sys.executable} is {version}. Use make PYTHON=python3.11.")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise InstallError(
            f"{sys.executable} {version} lacks its venv module (Debian: apt-get install python3-venv)."
        ) from None


def has_nvidia_device(root: Path = Path("/")) -> bool:
    return any(next(root.glob(pattern), None) is not None for pattern in DEVICES)


def torch_index(has_gpu: bool) -> str:
    """The index that torch alone comes from; empty for pip's own."""
    wanted = os.environ.get("TORCH_INDEX_URL", "").strip()
    if wanted and has_gpu:
        say(f"this machine shows an NVIDIA device: torch comes with CUDA, and TORCH_INDEX_URL={wanted} is not used.")
        return ""
    return wanted


def make_environment(folder: Path) -> Path:
    """An environment that is whole, or a new one; its Python. Raises InstallError where ``folder`` is something else."""
    python = folder / "bin" / "python"
    if _whole(folder).exists() and _runs(python):
        return python
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "pyvenv.cfg").is_file():
            raise InstallError(f"{folder} is not a virtual environment. Remove it, or choose another: make VENV=...")
        say(f"{folder} was left unfinished: making it again. What was downloaded is in pip's cache.")
    else:
        say(f"making {folder} ...")
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-2000:]
        raise InstallError(f"{folder} cannot be made by `{sys.executable} -m venv`:\n{words}")
    return python


def pip_install(python: Path, arguments: list[str]) -> None:
    """Raises InstallError. pip's progress is shown on a terminal."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [str(python), "-m", "pip", "install", *quiet, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as pip:
        assert pip.stderr is not None
        words = []
        for line in pip.stderr:
            sys.stderr.write(line)
            words.append(line)
    if pip.returncode != 0:
        raise InstallError(remedy("".join(words)))


def remedy(words: str) -> str:
    """What to do about an error of pip's, by its own words."""
    if any(sign in words for sign in UNREACHED):
        return (
            "pip cannot reach its package index. Connect this machine, set PIP_PROXY or PIP_INDEX_URL, or bring "
            "a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=folder make ..."
        )
    if "No space left on device" in words:
        return "the disk is full. Free some space; with `TMPDIR=folder` pip unpacks elsewhere."
    if "No matching distribution" in words or "ResolutionImpossible" in words:
        return (
            "no package that fits is in the index. requirements.lock names the versions that CI tested; `make LOCK=` takes the "
            "newest that pyproject.toml admits."
        )
    return "pip failed; its own words stand above. `make` again starts where this began."


def renew_pip(python: Path) -> bool:
    """Whether pip is new enough to ask without downloading, after trying to make it so."""
    if _pip_version(python) < OLDEST_PIP:
        newest = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip"]
        subprocess.run(newest, capture_output=True, check=False)
    return _pip_version(python) >= OLDEST_PIP


def requirements(extras: list[str]) -> list[str]:
    """What pyproject.toml asks for, with ``extras``."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def announce(python: Path, wanted: list[str], constraints: list[str], index: str, has_gpu: bool) -> None:
    """Say how much will be downloaded. Raises InstallError where pip finds no way to install it at all."""
    from download import PipError, announcement, planned

    try:
        if index and not _has_torch(python):
            only = planned(python, ["torch"], [*constraints, "--no-deps", "--index-url", index])
            wanted = [*wanted, *(f"torch=={package.version}" for package in only)]
            constraints = [*constraints, "--extra-index-url", index]
        packages = planned(python, wanted, constraints)
    except PipError as error:
        sys.stderr.write(str(error))
        raise InstallError(remedy(str(error))) from None
    for line in announcement(packages, has_gpu):
        say(line)


def install(folder: Path, extras: list[str], lock: str) -> None:
    """The whole of it. Raises InstallError."""
    check_python()
    if not any(map(shutil.which, shlex.split(os.environ.get("CXX", ""))[:1] or ["g++", "c++"])):
        say("no C++ compiler: torch does the native library's work, several times slower (Debian: apt-get install g++).")
    python = make_environment(folder)
    has_gpu = has_nvidia_device()
    index = torch_index(has_gpu)
    constraints = ["--constraint", lock] if lock else []
    if renew_pip(python):
        announce(python, requirements(extras), constraints, index, has_gpu)
    else:
        say("how much will be downloaded is unknown: this pip cannot tell beforehand, and a newer one was not to be reached.")
    _whole(folder).unlink(missing_ok=True)
    if index and not _has_torch(python):
        pip_install(python, [*constraints, "--no-deps", "--index-url", index, "torch"])
    suffix = f"[{','.join(extras)}]" if extras else ""
    pip_install(python, [*constraints, "--editable", f"{ROOT}{suffix}"])
    _whole(folder).touch()


def say(line: str) -> None:
    print(f"make: {line}", file=sys.stderr, flush=True)


def _whole(folder: Path) -> Path:
    """There while the environment is as the last installation left it: written last, taken away first."""
    return folder / ".whole"


def _runs(python: Path) -> bool:
    try:
        return subprocess.run([str(python), "-c", "import pip"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _has_torch(python: Path) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def _pip_version(python: Path) -> tuple[int, ...]:
    code = "import pip; print(pip.__version__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    digits = [part for part in done.stdout.strip().split(".")[:2] if part.isdigit()]
    return tuple(map(int, digits))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="a group of optional dependencies in pyproject.toml")
    parser.add_argument("--lock", default=str(ROOT / "requirements.lock"), help="versions to keep to; '' for the newest")
    arguments = parser.parse_args(argv)
    try:
        install(arguments.folder, arguments.extra, arguments.lock)
    except InstallError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("stopped. `make` again starts over; what was downloaded is in pip's cache.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
