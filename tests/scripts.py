"""Scripts of benchmarks/ as modules: they are in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(path: str) -> ModuleType:
    """The module of ``benchmarks/<path>``, which finds its neighbours as it does where Python runs it."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), BENCHMARKS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    paths, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str((BENCHMARKS / path).parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = paths
        for name in set(sys.modules) - modules:  # another folder's neighbours have the same names
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
                del sys.modules[name]
    return module
