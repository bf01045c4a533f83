"""Scripts of benchmarks/ as modules: they are in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(path: str) -> ModuleType:
    """The module of ``benchmarks/<path>``."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), BENCHMARKS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module
