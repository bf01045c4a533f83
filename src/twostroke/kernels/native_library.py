"""The native library through ctypes: found, checked and loaded once; absent where it was not built or does not fit.

``python -m twostroke.kernels.native_library build`` builds it beside the sources. ``TWOSTROKE_NATIVE=0`` turns it off.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from twostroke.core.errors import ConfigError
from twostroke.kernels.native import build as native_build

PATH = native_build.FOLDER / native_build.LIBRARY_NAME

_POINTER, _INT, _INT64, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_BITS, _TEXT = ctypes.c_uint64, ctypes.c_char_p
_SHAPE = [_INT, _INT, _INT64, _INT64]  # format, group, n, k
_ROWS = [_INT64, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER]  # m, f32, bf16, codes, scales, sums
_MIRRORED: dict[str, int] = {}  # bytes by the library's name of a structure

Structure = TypeVar("Structure", bound=ctypes.Structure)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ts_sources": (_TEXT, []),
    "ts_size_of": (_INT64, [_TEXT]),
    "ts_feature_names": (_TEXT, []),
    "ts_features": (_BITS, []),
    "ts_target_name": (_TEXT, [_INT]),
    "ts_target_needs": (_BITS, [_INT]),
    "ts_target": (_INT, []),
    "ts_set_target": (_INT, [_INT]),
    "ts_choose": (_INT, [_BITS, _INT]),
    "ts_threads": (_INT, []),
    "ts_set_threads": (None, [_INT]),
    "ts_pin_threads": (None, [_POINTER, _INT]),
    "ts_processors": (None, [_POINTER, _INT]),
    "ts_place": (None, [*_SHAPE, _POINTER]),
    "ts_set_huge_pages": (None, [_INT]),
    "ts_collapse": (_INT64, []),
    "ts_run_alone": (None, [_INT]),
    "ts_allocate": (_POINTER, [_INT64]),
    "ts_release": (None, [_POINTER]),
    "ts_packed_bytes": (_INT64, _SHAPE),
    "ts_padded": (_INT64, [_INT64]),
    "ts_sums_per_row": (_INT64, [_INT64]),
    "ts_pack": (None, [*_SHAPE, _POINTER, _POINTER, _POINTER, _POINTER]),
    "ts_quantize_columns": (None, [_INT, _POINTER, _INT64, _INT64, _POINTER, _POINTER]),
    "ts_prepare_rows": (None, [_INT, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _POINTER, _POINTER]),
    "ts_product": (None, [*_SHAPE, _POINTER, _POINTER, *_ROWS, _POINTER, _INT64, _INT]),
    "ts_product_range": (None, [*_SHAPE, _POINTER, _POINTER, *_ROWS, _INT64, _INT64, _POINTER, _INT64, _INT]),
    "ts_read_seconds": (_DOUBLE, [_POINTER, _INT64, _INT]),
    "ts_chunk_rows": (_INT64, [_INT64, _INT64]),
    "ts_prefetch_bytes": (_INT64, []),
    "ts_pass_seconds": (_DOUBLE, [_POINTER, _INT, _POINTER, _POINTER, _INT64, _INT64, _INT]),
    "ts_barrier_seconds": (_DOUBLE, [_INT]),
    "ts_adjust": (None, [_POINTER, _INT64, _POINTER, _INT64, _INT64]),
    "ts_restore": (None, [_POINTER, _INT64, _POINTER, _INT64, _INT64]),
    "ts_draw": (_INT, [_POINTER, _INT64, _POINTER, _INT64, _INT64]),
    "ts_top": (_INT, [_POINTER, _INT64, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _POINTER, _INT64]),
    "ts_trains_attention": (_INT, []),
    "ts_attend": (None, [_POINTER, _POINTER, _POINTER]),
    "ts_attend_backward": (None, [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER]),
}


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None; ``why_absent`` then says why."""
    return _load()[0]


@cache
def why_absent() -> str:
    """A sentence that says why there is no native library; empty where there is one."""
    return _load()[1]


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    remedy = "Build it with `python -m twostroke.kernels.native_library build`."
    if os.environ.get("TWOSTROKE_NATIVE", "1").strip().lower() in ("0", "off", "no", "false"):
        return None, f"TWOSTROKE_NATIVE={os.environ['TWOSTROKE_NATIVE']} turns native code off."
    if not PATH.exists():
        return None, f"{PATH} does not exist: no compiler was there when Twostroke was installed. {remedy}"
    try:
        loaded = open_library(PATH)
        built_from = loaded.ts_sources().decode()
    except (OSError, AttributeError) as error:
        return None, f"{PATH} cannot be used ({error}). {remedy}"
    if native_build.sources() and built_from != native_build.sources_hash():
        return None, f"{PATH} was built from other sources than those beside it. {remedy}"
    return (None, differs) if (differs := _other_size(loaded)) else (loaded, "")


def mirror(name: str) -> Callable[[type[Structure]], type[Structure]]:
    """Of a structure that has the fields of the library's ``ts::name``: their sizes are compared when the library is loaded."""

    def mirrored(structure: type[Structure]) -> type[Structure]:
        mirror_bytes(name, ctypes.sizeof(structure))
        return structure

    return mirrored


def mirror_bytes(name: str, n_bytes: int) -> None:
    """The same for what is no ctypes structure. Raises ConfigError where a library that was loaded before has another size."""
    _MIRRORED[name] = n_bytes
    loaded = library() if _load.cache_info().currsize else None
    if loaded is not None and (differs := _other_size(loaded)):
        raise ConfigError(differs)


def _other_size(loaded: ctypes.CDLL) -> str:
    """A sentence about the first structure that has another size in the library; empty if they agree."""
    for name, n_bytes in _MIRRORED.items():
        if (there := loaded.ts_size_of(name.encode())) != n_bytes:
            return f"ts::{name} takes {there} bytes in the library and {n_bytes} in Python. Change both together."
    return ""


def open_library(path: Path) -> ctypes.CDLL:
    """The library at ``path`` with its functions' types. Raises OSError, or AttributeError where it has not all of them."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def features() -> tuple[str, ...]:
    """What the processor and its operating system can run, of what some target needs; empty without the library."""
    loaded = library()
    return () if loaded is None else _names(loaded, loaded.ts_features())


def targets(loaded: ctypes.CDLL | None = None) -> dict[str, tuple[str, ...]]:
    """The instruction sets that ``loaded`` (the library) is compiled for, the fastest last, with the features each needs."""
    loaded = loaded or library()
    found: dict[str, tuple[str, ...]] = {}
    while loaded is not None and (name := loaded.ts_target_name(len(found))) is not None:
        found[name.decode()] = _names(loaded, loaded.ts_target_needs(len(found)))
    return found


def holding(loaded: ctypes.CDLL | None = None) -> tuple[str, ...]:
    """Those of ``targets`` whose every feature is there. The last of them is used unless another is set."""
    loaded = loaded or library()
    if loaded is None:
        return ()
    return tuple(name for i, name in enumerate(targets(loaded)) if loaded.ts_choose(loaded.ts_features(), i) == i)


def target(loaded: ctypes.CDLL | None = None) -> str:
    """The one in use; empty without the library."""
    loaded = loaded or library()
    return "" if loaded is None else loaded.ts_target_name(loaded.ts_target()).decode()


def set_target(name: str, loaded: ctypes.CDLL | None = None) -> None:
    """Use target ``name`` from now on, for tests and measurements. Raises ConfigError where it does not hold."""
    loaded = loaded or library()
    held = holding(loaded)
    if loaded is None or name not in held:
        remedy = f"Use one of {', '.join(held)}." if held else why_absent()
        raise ConfigError(f"target {name!r} cannot run here. {remedy}")
    loaded.ts_set_target(list(targets(loaded)).index(name))


def _names(loaded: ctypes.CDLL, bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in enumerate(loaded.ts_feature_names().decode().split()) if bits >> bit & 1)


def main(arguments: list[str]) -> int:
    if arguments != ["build"]:
        print("usage: python -m twostroke.kernels.native_library build", file=sys.stderr)
        return 2
    try:
        print(native_build.build(Path(PATH)))
    except native_build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
