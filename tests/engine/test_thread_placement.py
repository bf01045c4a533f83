"""Threads, pins and large pages decide where a step is computed, and never what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_drafts import GREEDY, PROMPTS, directory, run

from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.engine.core import EngineCore
from twostroke.kernels.native_library import library, why_absent
from twostroke.scheduling.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())

WIDE: dict[str, Any] = {"d_model": 256, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "d_ff": 2048, "vocab_size": 4096}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose products are large enough to be taken piece by piece."""
    return directory(tmp_path_factory.mktemp("models"), **WIDE)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_pieces_that_any_thread_takes_have_the_bits_of_one_thread(wide: Path, weights: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    one, *others = (run(EngineCore(wide, EngineSettings(dtype=weights, n_threads=n)), PROMPTS, params) for n in (1, 2, 3, 7))
    assert all(found == one for found in others)


def test_equal_logits_give_the_first_token_whoever_finds_it(tmp_path: Path) -> None:
    """A head whose rows repeat has its largest logit many times, in many threads' pieces."""
    import torch

    from twostroke.model.load import load_model
    from twostroke.model.save import save_model

    decoder = load_model(directory(tmp_path, **WIDE, tied_embeddings=False))
    assert decoder.head is not None
    with torch.no_grad():
        decoder.head.weight.copy_(decoder.head.weight[:64].repeat(64, 1))
    save_model(decoder, decoder.spec, tmp_path / "repeated")
    for n_threads in (1, 2, 5):
        core = EngineCore(tmp_path / "repeated", EngineSettings(dtype="bf16", n_threads=n_threads))
        tokens = [token for answer in run(core, PROMPTS, GREEDY) for token in answer[0]]
        assert max(tokens) < 64


CODE = """
import json, os, sys
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams
core = EngineCore(sys.argv[1], EngineSettings(dtype="bf16", **json.loads(sys.argv[2])))
core.add_request("a", [5, 9, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1))
found = []
while core.has_work:
    found += [(event.token_ids, [entry.logprob for entry in event.logprobs or ()]) for event in core.step()]
print(found, len(os.sched_getaffinity(0)), core.huge_page_bytes >= 0)
"""


def test_placement_changes_no_answer(wide: Path) -> None:
    """Pins are a process's, so each of them has one."""
    import json

    ways: list[dict[str, Any]] = [
        {}, {"pin_threads": "cores", "n_threads": 1}, {"pin_threads": "nodes", "huge_pages": "on"}, {"huge_pages": "off"},
    ]  # fmt: skip
    said = {
        subprocess.run(
            [sys.executable, "-c", CODE, str(wide), json.dumps(way)], capture_output=True, text=True, timeout=120, check=True
        ).stdout
        for way in ways
    }
    assert len(said) == 1


@pytest.mark.parametrize(("name", "value"), [("pin_threads", "cores"), ("huge_pages", "on"), ("huge_pages", "off")])
def test_what_needs_the_library_says_so(wide: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}' is of the native library's"):
        EngineCore(wide, EngineSettings(runner="torch", **{name: value}))


def test_more_pinned_threads_than_processors_are_refused(wide: Path) -> None:
    with pytest.raises(ConfigError, match="200 threads cannot be pinned"):
        EngineCore(wide, EngineSettings(pin_threads="nodes", n_threads=200))
