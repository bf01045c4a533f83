"""What an installation will download, asked of pip before anything is fetched, and what would make it less.

pip resolves with ``--dry-run``, which reads metadata alone since 25.3; sizes are asked of the servers that hold the files.
A size that no server tells is said to be unknown, never guessed. Standard library only.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

CPU_INDEX_URL = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of builds without CUDA: the one a person is told to use on a machine without a GPU."""

FOR_GPUS = ("nvidia-", "cuda-", "triton")
"""What PyPI's torch for Linux asks for and a machine without a GPU never loads."""

NAMED = 4
"""Packages that the announcement names, the largest first; the others are counted."""

PATIENCE_S = 10.0


@dataclass(frozen=True)
class Package:
    """A file that pip will fetch. ``n_bytes`` None: no server told its size."""

    name: str
    version: str
    url: str
    n_bytes: int | None = None

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).scheme == "file"

    @property
    def is_for_gpus(self) -> bool:
        return self.name.lower().startswith(FOR_GPUS)


class PipError(Exception):
    """pip ended with an error; the text is what it wrote."""


def planned(python: Path, requirements: list[str], options: list[str]) -> list[Package]:
    """The files that ``pip install`` with these arguments would fetch into ``python``'s environment. Raises PipError."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--quiet",
            "--report",
            str(report),
            *options,
            *requirements,
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise PipError(done.stderr)
        entries = json.loads(report.read_text())["install"]
    found = [Package(e["metadata"]["name"], e["metadata"]["version"], e["download_info"]["url"]) for e in entries]
    with ThreadPoolExecutor(8) as pool:
        sizes = pool.map(size_of, (package.url for package in found))
    return [Package(p.name, p.version, p.url, n) for p, n in zip(found, sizes, strict=True)]


def size_of(url: str) -> int | None:
    """Bytes of the file at ``url``, asked with a HEAD request, or None where that is not told."""
    try:
        if urlsplit(url).scheme == "file":
            path = Path(unquote(urlsplit(url).path))
            return path.stat().st_size if path.is_file() else None
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError, urllib.error.URLError):
        return None


def announcement(packages: list[Package], has_gpu: bool) -> list[str]:
    """Lines for the person who waits: how much, of what, and the command that makes it less."""
    if not packages:
        return ["nothing to download: every package is there."]
    away = [package for package in packages if not package.is_local]
    known = sorted((p for p in away if p.n_bytes is not None), key=lambda p: p.n_bytes or 0, reverse=True)
    unknown = [package.name for package in away if package.n_bytes is None]
    lines = []
    if known:
        named = ", ".join(f"{p.name} {p.version} ({in_words(p.n_bytes or 0)})" for p in known[:NAMED])
        rest = f", and {len(known) - NAMED} smaller ones" if len(known) > NAMED else ""
        lines.append(f"at most {in_words(_total(known))} to download, less what pip's cache holds: {named}{rest}.")
    if unknown:
        few = ", ".join(unknown[:NAMED]) + (", ..." if len(unknown) > NAMED else "")
        lines.append(f"of {len(unknown)} packages no server tells the size: {few}.")
    local = [package for package in packages if package.is_local]
    if local:
        lines.append(f"{len(local)} packages from folders of this machine, {in_words(_total(local))}.")
    cuda = [package for package in packages if package.is_for_gpus]
    if cuda and not has_gpu:
        total = f", {in_words(_total(cuda))}" if any(p.n_bytes for p in cuda) else ""
        lines.append(f"{len(cuda)} of these packages serve NVIDIA GPUs alone{total}, and this machine shows none.")
        lines.append(f"To do without them: make TORCH_INDEX_URL={CPU_INDEX_URL}")
    return lines


def in_words(n_bytes: float) -> str:
    """Decimal megabytes or gigabytes, two or three digits: 187 MB, 3.9 GB."""
    if n_bytes >= 0.9995e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 9.5e5 else f"{n_bytes / 1e3:.0f} kB"


def _total(packages: list[Package]) -> int:
    return sum(package.n_bytes or 0 for package in packages)
