"""Virtual environments of peers: this package's own packages, and above them what the peer needs."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = {
    "litgpt": ("litgpt", "lightning", "lightning-utilities", "torchmetrics", "jsonargparse", "pytorch-lightning"),
    "bitsandbytes": ("bitsandbytes",),
}
_known: dict[str, str] = {}


def python_of(name: str | None, folder: Path, existing: Path | None = None) -> str:
    """The interpreter of peer ``name``: of ``existing`` where it is given, else of an environment in ``folder``, made at need.

    It sees this package's own environment through a ``.pth`` file, so that every engine runs on the same torch.
    """
    if name is None:
        return sys.executable
    if existing is not None:
        _known[name] = str(existing / "bin" / "python")
    if name not in _known:
        directory = folder / "venvs" / name
        if not (directory / "bin" / "python").exists():
            venv.create(directory, with_pip=True)
            (site,) = directory.glob("lib/python*/site-packages")
            line = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})"
            (site / "shared.pth").write_text(line + "\n", encoding="utf-8")
            pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps"]
            subprocess.run([*pip, *PACKAGES[name]], check=True)
        _known[name] = str(directory / "bin" / "python")
    return _known[name]
