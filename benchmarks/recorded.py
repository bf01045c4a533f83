"""How a run of a benchmark is recorded: its command without the machine's folders, on what it ran, and its files."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from twostroke.core.profile import read_fingerprint
from twostroke.ledger.code_version import code_version

ROOT = Path(__file__).resolve().parents[1]
_PATH = re.compile(r"""(?<![^\s=,:'"(\[])/(?!/)[^\s,'")\]]+""")
"""An absolute path: it begins a word, or follows ``--out=`` or ``draft:``. After a URL's scheme there are two slashes."""


def without_folders(text: str) -> str:
    """``text`` with ``FOLDER`` for the folder of each absolute path; one in this repository is named from its root."""
    return _PATH.sub(lambda path: _named(Path(path[0])), text)


def _named(path: Path) -> str:
    inside = path.resolve()
    return str(inside.relative_to(ROOT)) if inside.is_relative_to(ROOT) else f"FOLDER/{path.name}"


def command() -> str:
    """The command of this process as it is typed in the repository's root, for a shell."""
    words = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
    return shlex.join(["python", *map(without_folders, words)])


def machine() -> str:
    """The processor as Linux names it, with its family and model: virtual machines of Zen 3, 4 and 5 all name ``AMD EPYC``."""
    here, found = read_fingerprint(), dict[str, str]()
    if (file := Path("/proc/cpuinfo")).is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    told = f" (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else ""
    return ", ".join([f"{here.n_cores} cores of {here.cpu_model}{told}", *here.gpus])


def conditions() -> dict[str, Any]:
    """Under what a run is measured: to be taken before its first measurement."""
    return {
        "command": command(),
        "machine": machine(),
        "torch": version("torch"),
        "twostroke": code_version(),
        "load_average_at_start": os.getloadavg()[0],
    }


def write(out: Path, files: dict[str, Any]) -> None:
    """The ``files`` of a run's folder ``out``: text as it is, all else as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (out / name).write_text(text, encoding="utf-8")
