"""The native library under engines of random shape, here as it is built, in `make soak` under sanitizers (GCC's)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import random_engines

from twostroke.kernels import native_library
from twostroke.kernels.native import build as native_build

if native_library.library() is None:
    pytest.skip(native_library.why_absent(), allow_module_level=True)

SCRIPT = Path(random_engines.__file__)
COMMON = ("-O1", "-g1", "-fno-sanitize-recover=all")
BUILDS = {
    # The library's own slabs of memory have no borders that a sanitizer knows.
    "address": ("-fsanitize=address,undefined", *COMMON, "-DTS_PLAIN_MEMORY"),
    "thread": ("-fsanitize=thread", *COMMON),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # Python and torch keep what they allocate at load
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1",
}


@pytest.mark.parametrize("n_threads", [1, 2])
def test_engines_of_random_shape_end_every_request_and_give_back_every_page(n_threads: int) -> None:
    found = random_engines.run(seed=n_threads, n_engines=10, n_threads=n_threads)
    assert found["length"] > 10
    assert found["error"] > 0, "damaged weights"


def test_callers_of_the_pool_and_its_resizing_do_not_race() -> None:
    random_engines.race(200)


class Sanitized:
    """Builds of the library, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, build: str, *arguments: object, emulated_tiles: bool = False) -> str:
        """What the script prints under ``build``. A report of the sanitizer is a failure."""
        name = f"{build}{'-emulated' if emulated_tiles else ''}"
        flags = {"": BUILDS[build]}
        if emulated_tiles:
            flags |= dict.fromkeys(("kernels_amx", "attention_amx"), ("-DTS_EMULATE_AMX",))
        path = self.folder / f"{name}.so"
        if not path.exists():
            native_build.build(path, flags)
        runtime = f"lib{ {'address': 'asan', 'thread': 'tsan'}[build] }.so"
        asked = [*native_build.compiler(), f"-print-file-name={runtime}"]
        preload = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(preload).is_absolute():
            pytest.skip(f"the compiler has no {runtime}")
        search = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(SCRIPT.parents[1])]).strip(
            os.pathsep
        )
        environment = {**os.environ, **OPTIONS, "LD_PRELOAD": preload, "PYTHONPATH": search}
        command = [sys.executable, str(SCRIPT), str(path), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    return Sanitized(tmp_path_factory.mktemp("sanitized"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(5))
def test_1355_engines_read_and_write_only_what_is_theirs(sanitized: Sanitized, part: int) -> None:
    sanitized.run("address", "engines", 100 + part, 271, 1 + part % 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_engines_with_emulated_tiles_read_and_write_only_what_is_theirs(sanitized: Sanitized) -> None:
    if "avx512bf16" not in native_library.holding():
        pytest.skip("the code around the tiles needs AVX-512-BF16")
    sanitized.run("address", "engines", 200, 100, 1, emulated_tiles=True)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("n_threads", "n_engines"), [(2, 138), (3, 138), (4, 137)])
def test_413_engines_on_several_threads_do_not_race(sanitized: Sanitized, n_threads: int, n_engines: int) -> None:
    sanitized.run("thread", "engines", 300 + n_threads, n_engines, n_threads)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_6000_regions_of_two_callers_do_not_race(sanitized: Sanitized) -> None:
    sanitized.run("thread", "race", 6000)
