"""Adds the native library to the build that pyproject.toml describes. Without a compiler the package installs without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NAME = "twostroke.kernels.native._native"


def native_build() -> ModuleType:
    path = Path(__file__).resolve().parent / "src/twostroke/kernels/native/build.py"
    spec = importlib.util.spec_from_file_location("twostroke_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Files have flags of their own, and the result is loaded by ctypes: neither is what an extension module's build does."""

    def build_extension(self, ext: Extension) -> None:
        build = native_build()
        try:
            build.build(Path(self.get_ext_fullpath(ext.name)))
        except build.BuildError as error:
            raise CompileError(str(error)) from error

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


setup(ext_modules=[Extension(NAME, sources=[], optional=True)], cmdclass={"build_ext": BuildNative})
