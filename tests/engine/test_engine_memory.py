"""A process holds its packed weights and what its cache was touched in, and little else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from small_models import SPECS, saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.policy import MAX_PAGES
from twostroke.engine.core import EngineCore
from twostroke.engine.kv_pool import KVPool, token_bytes
from twostroke.engine.memory import untouched_zeros
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.kernels.native_library import library
from twostroke.model.decoder import Decoder
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

INTERPRETER_BYTES = 100e6
"""What is granted beyond 1.1 × (weights + cache) to a process that has imported everything already."""

PROGRAM = """
import re, sys
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams

def held(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1))

before = held("VmRSS")
given = {"max_model_len": 256, "kv_cache_bytes": 2**27, "n_threads": 1, "runner": "native"}
core = EngineCore(sys.argv[1], EngineSettings(dtype=sys.argv[2], kv_dtype="bf16", **given))
core.add_request("a", list(range(20)), SamplingParams(max_tokens=8, ignore_eos=True))
while core.has_work:
    core.step()
print(held("VmHWM") - before, held("VmRSS") - before, core.weights_bytes, core.kv_cache_bytes, core.loaded_packed)
"""


def _rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return 1024 * int(line.split()[1])
    raise AssertionError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 MB in bf16, a third of it the table and head."""
    sizes = {"vocab_size": 32768, "n_layers": 8, "d_model": 1024, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64, "d_ff": 1536}
    spec = replace(SPECS["llama"], **sizes, tied_embeddings=True)
    directory = tmp_path_factory.mktemp("memory") / "m"
    decoder = Decoder(spec, torch.bfloat16, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(0.01)
    save_model(decoder, spec, directory, dtype="bf16")
    return directory


@pytest.mark.skipif(library() is None or sys.platform != "linux", reason="the native library, and Linux' counts of memory")
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_a_process_peaks_near_its_weights_and_cache_whether_it_packs_them_or_reads_them_packed(model: Path, dtype: str) -> None:
    for was_packed in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(model), dtype], capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == 0, done.stderr
        peak, held, weights, cache, packed = done.stdout.split()
        assert packed == str(was_packed)
        assert int(peak) <= 1.1 * (int(weights) + int(cache)) + INTERPRETER_BYTES
        # Twenty-eight tokens take a little of the cache, not a large page in each layer and head.
        assert int(held) <= 1.1 * int(weights) + INTERPRETER_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' counts of memory")
@pytest.mark.parametrize("kind", [KVPool, TiledKVPool])
def test_a_cache_takes_memory_only_where_it_is_written(kind: type[KVPool] | type[TiledKVPool]) -> None:
    spec = replace(SPECS["llama"], n_layers=8, n_kv_heads=8, n_heads=8, head_dim=64, d_model=512)
    n_pages = 2**28 // (16 * token_bytes(spec, "bf16"))
    before = _rss()
    pool = kind(spec, n_pages, 16, "bf16")
    for layer in range(spec.n_layers):
        pool.write(layer, torch.tensor([5, n_pages * 8]), torch.ones(16, 2, 64))
    assert _rss() - before < 16e6  # of 256 MB
    keys, values = pool.run(3, 5, 2)
    assert keys[:, :, 0].float().mean() == values[:, :, 0].float().mean() == 1.0
    assert not keys[:, :, 1].any()
    assert not values[:, :, 1].any()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' counts of memory")
@pytest.mark.parametrize("runner", ["native", "torch"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_bytes": 2**32}])
def test_positions_that_a_config_only_tells_of_take_no_memory(tmp_path: Path, runner: str, options: dict[str, int]) -> None:
    if runner == "native" and library() is None:
        pytest.skip("the native library was not built")
    narrow = {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "d_model": 2, "d_ff": 2}
    directory = saved("llama", tmp_path / "m", max_positions=10**9, **narrow)[1]
    before = _rss()
    core = EngineCore(directory, EngineSettings(runner=runner, n_threads=1, **options))  # type: ignore[arg-type]
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    while core.has_work:
        core.step()
    assert _rss() - before < 64e6
    assert core.max_model_len == MAX_PAGES * 16


def test_zeros_are_zeros_and_can_be_written() -> None:
    zeros = untouched_zeros(10_000)
    assert not zeros.any()
    zeros[:] = 7
    assert (zeros == 7).all()
