"""Writes ``requirements.lock``: the exact versions, in this environment, of what pyproject.toml and its extras lead to.

Run by ``make lock`` in the environment that has just passed ``.ci/run``. A build's local part ("+cpu") is left out, so that the
lock holds on every index; hashes are left out for the same reason: torch's builds for CPUs and GPUs are different files.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEAD = """\
# What CI tested, exactly, on Python {python}. `make` keeps to it; `make LOCK=` takes the newest that pyproject.toml admits.
# Written by `make lock`.
"""


def asked_for() -> list[Requirement]:
    """Every line of pyproject.toml's dependencies and extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in chain(project["dependencies"], *project["optional-dependencies"].values())]


def closure(wanted: list[Requirement]) -> dict[str, str]:
    """Version by name of all that ``wanted`` leads to in this environment. Raises PackageNotFoundError for what is missing."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, extra) for requirement in wanted for extra in (*requirement.extras, "")]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found = distribution(name)
        versions[name] = Version(found.version).public
        for line in found.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed, inner) for inner in (*needed.extras, "")]
    return versions


def main() -> int:
    try:
        versions = closure(asked_for())
    except PackageNotFoundError as missing:
        print(f"{missing.name} is not installed: a lock is made of every extra. Run `make lock`.", file=sys.stderr)
        return 2
    head = HEAD.format(python=".".join(map(str, sys.version_info[:2])))
    LOCK.write_text(head + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))
    print(f"wrote {LOCK.name}: {len(versions)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
