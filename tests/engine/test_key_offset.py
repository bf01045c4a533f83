"""What the keys of a head share is taken off before they are rounded, and nobody but the rounding notices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_models import decoder_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine import core as engine_core
from twostroke.engine.core import EngineCore
from twostroke.engine.scoring import token_scores
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.kernels.native_library import library
from twostroke.model.save import save_model

RUNNERS = ["torch", pytest.param("native", marks=pytest.mark.skipif(library() is None, reason="the library was not built"))]


@pytest.fixture
def biased(tmp_path: Path) -> Path:
    """A model whose keys have a large constant in the dimensions that positions turn least."""
    decoder = decoder_of("qwen2", vocab_size=97)
    spec = decoder.spec
    with torch.no_grad():
        for block in decoder.blocks:
            bias = block.attn.qkv.bias[spec.n_heads * spec.head_dim : (spec.n_heads + spec.n_kv_heads) * spec.head_dim]
            bias.view(spec.n_kv_heads, 2, spec.head_dim // 2)[:, :, -1] += 400.0
    return save_model(decoder, spec, tmp_path / "m")


def engine_of(directory: Path, runner: str, kv_dtype: str) -> EngineCore:
    return EngineCore(directory, EngineSettings(dtype="fp32", kv_dtype=kv_dtype, runner=runner, n_threads=1, max_model_len=48))


def scores(engine: EngineCore) -> torch.Tensor:
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    return torch.from_numpy(token_scores(engine, [(ids, 1)])[0][0])


@pytest.mark.parametrize(("kv", "times"), [("int8", 4), ("int4", 2)])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_cache_in_codes_without_the_offset_loses_times_as_much(
    biased: Path, runner: str, kv: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = scores(engine_of(biased, runner, "fp32"))
    engine = engine_of(biased, runner, kv)
    assert isinstance(engine.pool, TiledKVPool)
    assert float(engine.pool.key_offset.abs().amax()) > 100
    assert engine.scheduler.pool.n_used == 0
    monkeypatch.setattr(engine_core, "centre_keys", lambda *parts: None)
    without = engine_of(biased, runner, kv)
    error, other = (float((scores(e) - exact).square().mean().sqrt()) for e in (engine, without))
    print(f"error {error:.2e}, without the offset {other:.2e}")
    assert error < other / times


@pytest.mark.skipif(library() is None, reason="the library was not built")
def test_both_runners_find_the_same_offset(biased: Path) -> None:
    pools = [engine_of(biased, runner, "int8").pool for runner in ("torch", "native")]
    # Of the first layer: those behind it read what rounding has made of it.
    first = [pool.key_offset[0] for pool in pools if isinstance(pool, TiledKVPool)]
    torch.testing.assert_close(*first, rtol=1e-3, atol=1e-2)
