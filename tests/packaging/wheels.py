"""Small wheels and an index of them in a folder: what pip is given where a test may not use the network."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_wheel(index: Path, name: str, version: str, requires: Sequence[str] = (), payload_bytes: int = 0) -> Path:
    """A wheel of an empty module with ``payload_bytes`` beside it, filed where a simple index has it."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {r}\n" for r in requires)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{module}/__init__.py", "")
        archive.writestr(f"{module}/payload", bytes(payload_bytes))
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    simple_index(folder)
    return wheel


BACKEND = """
import zipfile
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "twostroke-0.1.0-py3-none-any.whl"
    requires = "Requires-Dist: torch>=2.11,<2.14\\nRequires-Dist: numpy>=1.26\\n"
    with zipfile.ZipFile(Path(folder) / name, "w") as archive:
        archive.writestr("twostroke/__init__.py", "")
        info = "twostroke-0.1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: twostroke\\nVersion: 0.1.0\\n" + requires)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{info}/RECORD", "")
    return name
"""
"""A build backend that needs nothing: isolation would ask an index for setuptools."""


def simple_index(folder: Path) -> None:
    """The page that a simple index shows of one package, for the wheels in ``folder``."""
    links = "".join(f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>")
