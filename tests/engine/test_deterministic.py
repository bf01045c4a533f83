"""One number in both phases: a token's log-probability has the same bits in whatever way the engine comes to compute it.

Alone or among others, the prompt at once or in chunks, on one thread or on two, in pages of another size, from cached prefixes,
while it is drawn, as a part of a prompt, and where evaluation reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import models as lora_models

from gguf_files import small_file
from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import ASKED, CACHE_TYPES
from twostroke.engine import ways
from twostroke.engine.core import EngineCore
from twostroke.engine.sampler import TokenLogprobs
from twostroke.engine.scoring import token_scores
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.interop.import_model import import_model
from twostroke.kernels import native_library
from twostroke.kernels.native_library import holding, library, set_target
from twostroke.scheduling.sampling_params import SamplingParams

native = pytest.mark.skipif(library() is None, reason=native_library.why_absent())

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},  # whole tiles of attention by matrix registers
    "mistral": {"sliding_window": 100},
    "qwen3": {},
    "olmo2": {},
    "gpt2": {},
    "gemma2": {"sliding_window": 100},
    "cohere2": {"sliding_window": 100},
    "granite": {},
    "glm4": {},
    "qwen2_moe": {},
    "gpt_oss": {"sliding_window": 100},
    "deepseek_v3": {},
}
FORMATS = [
    *((weights, "bf16") for weights in ASKED), *itertools.product(("bf16", "int8"), ("fp32", "int8")), ("bf16", "int4"),
]  # fmt: skip
DRAWN = SamplingParams(temperature=1.0, seed=11, max_tokens=7, ignore_eos=True, logprobs=5, prompt_logprobs=5)


def text(n: int, seed: int, n_vocab: int = 97) -> list[int]:
    ids: list[int] = torch.randint(0, n_vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@dataclass
class Told:
    """What an engine says of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)

    @property
    def own(self) -> list[float]:
        """ln p of all tokens but the prompt's first."""
        return [entry.logprob for entry in (*self.prompt, *self.logprobs)]


def ask(
    core: EngineCore, prompt: Sequence[int], params: SamplingParams = DRAWN, others: int = 0, lora: str | None = None
) -> Told:
    """The request's answer. It comes when the first of ``others`` decode and the last are still read."""
    for i in range(others):
        rest = SamplingParams(temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
        length = min(20 + 50 * i, core.max_model_len - rest.max_tokens)
        core.add_request(f"other{i}", text(length, seed=i + 1, n_vocab=core.spec.vocab_size), rest)
    if others:
        core.step()
    core.add_request("a", list(prompt), params, lora=lora)
    told = Told()
    while core.has_work:
        for event in core.step():
            if event.request_id == "a":
                assert event.finish_reason != "error"
                told.tokens += event.token_ids
                told.logprobs += event.logprobs or []
                told.prompt += event.prompt_logprobs or []
    return told


def scored(core: EngineCore, ids: Sequence[int], others: int = 0) -> list[float]:
    """ln p of each of ``ids`` but the first, as evaluation reads them, between ``others``."""
    before = [(text(min(10 + 40 * i, core.max_model_len), seed=i, n_vocab=core.spec.vocab_size), 1) for i in range(others)]
    found = token_scores(core, [*before, (list(ids), 1)])
    return [-float(n) for n in found[-1][0]]


def engine(directory: Path, token_budget: int, page_tokens: int, n_threads: int, **settings: Any) -> EngineCore:
    settings = {"deterministic": True, "max_running": 6, "kv_cache_bytes": 2**25} | settings
    return EngineCore(
        directory, EngineSettings(token_budget=token_budget, page_tokens=page_tokens, n_threads=n_threads, **settings)
    )


def same_bits(directory: Path, n_prompt: int = 270, **settings: Any) -> None:
    """Everything that this file's first sentence promises, of one model in one format."""
    alone = engine(directory, 512, 16, 1, **settings)
    prompt = text(n_prompt, seed=5, n_vocab=alone.spec.vocab_size)
    told = ask(alone, prompt)
    assert len(set(told.own)) > n_prompt // 2, "the model says the same of every token"
    assert scored(alone, prompt + told.tokens) == told.own
    for budget, page_tokens, n_threads, others in ((45, 16, 2, 3), (200, 24, 2, 2)):
        core = engine(directory, budget, page_tokens, n_threads, **settings)
        assert ask(core, prompt, others=others) == told
        assert scored(core, prompt + told.tokens, others) == told.own
        # Prompt and answer are in the prefix cache by now, written by prompt rows and by decode rows.
        hits = core.stats().prefix_hit_tokens
        again = ask(core, prompt, replace(DRAWN, prompt_logprobs=None), others=1)
        assert (again.tokens, again.logprobs) == (told.tokens, told.logprobs)
        assert core.stats().prefix_hit_tokens > hits
        n = n_prompt + 4  # a part of the answer is a prompt now, and only its end is scored
        hits = core.stats().prefix_hit_tokens
        on = ask(core, prompt + told.tokens[:4], replace(DRAWN, max_tokens=1, prompt_logprobs_start=n - 20))
        assert on.prompt == [*told.prompt, *told.logprobs][n - 21 : n - 1]
        assert core.stats().prefix_hit_tokens - hits == (n - 21) // page_tokens * page_tokens


def in_formats(name: str, folder: Path, formats: Sequence[tuple[str, str]]) -> None:
    directory = saved(name, folder / name, max_positions=512, **FAMILIES[name])[1]
    for weights, kv in formats:
        same_bits(directory, dtype=weights, kv_dtype=kv, head_dtype="int8" if weights == "int8" else "auto")


@native
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    in_formats(name, tmp_path, [("bf16", "bf16"), ("int8", "int8")])


@native
@pytest.mark.parametrize(("weights", "kv"), FORMATS)
def test_every_format(weights: str, kv: str, tmp_path: Path) -> None:
    in_formats("llama", tmp_path, [(weights, kv)])


@native
@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_every_format(name: str, tmp_path: Path) -> None:
    in_formats(name, tmp_path, list(itertools.product(ASKED, CACHE_TYPES)))


@native
@pytest.mark.parametrize("target", holding() if library() is not None else [])
def test_every_instruction_set_that_this_processor_has(target: str, tmp_path: Path) -> None:
    """Each for itself: two of them add in different orders."""
    directory = saved("qwen3", tmp_path / "m", max_positions=512, head_dim=64)[1]
    set_target(target)
    try:
        for weights in ("bf16", "int8"):
            same_bits(directory, dtype=weights, kv_dtype="bf16")
    finally:
        set_target(holding()[-1])


@native
def test_matrices_in_the_codes_of_a_gguf_file(tmp_path: Path) -> None:
    types = {"ffn_gate": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "attn_v": "Q6_K"}
    small_file(tmp_path / "m.gguf", "gemma3", types)
    import_model(tmp_path / "m.gguf", tmp_path / "kept")
    same_bits(tmp_path / "kept", n_prompt=40)


@native
def test_a_request_with_an_adapter(tmp_path: Path) -> None:
    base, (a, _), _ = lora_models("llama", tmp_path, 2)
    for dtype in ("bf16", "int8"):
        found = []
        for budget, n_threads, others in ((256, 1, 0), (20, 2, 3)):
            core = engine(base, budget, 16, n_threads, dtype=dtype)
            core.load_adapter("a", a)
            found.append(ask(core, text(60, seed=5), others=others, lora="a"))
        assert found[0] == found[1]


@native
def test_the_offset_of_an_int8_caches_keys_does_not_depend_on_the_token_budget(tmp_path: Path) -> None:
    directory = saved("qwen2", tmp_path / "m", max_positions=512)[1]
    pools = [engine(directory, budget, 16, 2, kv_dtype="int8", dtype="bf16").pool for budget in (512, 60)]
    assert isinstance(pools[0], TiledKVPool)
    assert isinstance(pools[1], TiledKVPool)
    assert bool((pools[0].key_offset != 0).any())
    assert torch.equal(pools[0].key_offset, pools[1].key_offset)


def test_an_engine_that_cannot_promise_it_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved("llama", tmp_path / "m")[1]
    with pytest.raises(ConfigError, match=r"deterministic needs the native library: .* Use runner='native' or 'auto'."):
        EngineCore(directory, EngineSettings(dtype="fp32", runner="torch", deterministic=True))
    monkeypatch.setattr(ways, "library", lambda: None)
    monkeypatch.setattr(ways, "why_absent", lambda: "It was not built.")
    with pytest.raises(ConfigError, match=r"deterministic needs the native library: .* It was not built."):
        EngineCore(directory, EngineSettings(dtype="fp32", deterministic=True))


@pytest.mark.parametrize("kv", CACHE_TYPES)
def test_torchs_scores_are_those_of_its_answers_but_for_the_order_of_sums(kv: str, tmp_path: Path) -> None:
    """Why the setting exists: the same promise by torch's products holds to rounding only."""
    directory = saved("llama", tmp_path / "m", max_positions=512)[1]
    settings = {"dtype": "fp32", "kv_dtype": kv, "runner": "torch", "deterministic": False}
    told = ask(engine(directory, 45, 16, 1, **settings), text(100, seed=5), others=2)
    found = scored(engine(directory, 512, 16, 1, **settings), [*text(100, seed=5), *told.tokens])
    assert found == pytest.approx(told.own, abs=1e-4 if kv == "fp32" else 0.3)
