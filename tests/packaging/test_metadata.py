"""What the package says of itself, and the versions that CI tested."""

from __future__ import annotations

import os
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_lock_holds_every_dependency_at_a_version_that_pyproject_admits() -> None:
    versions = locked()
    for line in chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        requirement = Requirement(line)
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{line}, and the lock has {version}: run `make lock`"


def test_the_lock_names_versions_that_every_index_has() -> None:
    """A local part, as in 2.13.0+cpu, is one index's alone."""
    assert not [version for version in locked().values() if "+" in version]


def test_the_licence_is_named_and_its_text_is_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_versions_of_h11_that_accept_malformed_chunks_are_refused() -> None:
    (h11,) = (Requirement(line) for line in PROJECT["dependencies"] if Requirement(line).name == "h11")
    assert not h11.specifier.contains("0.14.0")
    assert h11.specifier.contains("0.16.0")


def test_every_file_of_the_package_is_in_its_wheel() -> None:
    """Of what is beside the Python files: recipes, templates, tables, native sources."""
    package = ROOT / "src" / "twostroke"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["twostroke"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    built = {".py", ".pyc", ".so", ".part"}
    there = {Path(folder) / name for folder, _, names in os.walk(package, followlinks=True) for name in names}
    assert {path for path in there if path.suffix not in built} == shipped


def test_every_test_that_make_check_names_exists() -> None:
    """A renamed file fails here, and not first in `make check`."""
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", "unit", "PYTHON=true"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (line,) = (line for line in printed.splitlines() if "pytest -q tests/core" in line)
    named = [word for word in line.split() if word.startswith("tests/")]
    assert len(named) >= 10
    assert all((ROOT / name).exists() for name in named)
