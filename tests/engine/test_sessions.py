"""A conversation saved to a file goes on in another engine without its prompt being computed again."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from small_models import saved
from twostroke.core.errors import CapacityError, ConfigError, CorruptFileError, InputError, TwostrokeError
from twostroke.engine.llm import LLM
from twostroke.kernels.native_library import library
from twostroke.scheduling.sampling_params import SamplingParams

RUNNERS = ("torch", "native") if library() is not None else ("torch",)
PROMPT = [5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 3, 4, 4, 4, 12, 13, 71] * 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama")[1]


def opened(model: Path, **settings: Any) -> LLM:
    return LLM(model, **{"n_threads": 1, "dtype": "fp32", "kv_cache_bytes": 2**20, **settings})


def answer(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], GREEDY)[0].outputs[0].token_ids


def conversation(llm: LLM) -> list[int]:
    return PROMPT + answer(llm, PROMPT)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}, {"dtype": "bf16"}, {"dtype": "int8"}, {"separate_prefixes": True}],
)
def test_a_loaded_conversation_goes_on_as_before(llama: Path, tmp_path: Path, settings: dict[str, Any], runner: str) -> None:
    first = opened(llama, runner=runner, **settings)
    said = conversation(first)
    first.save_session(tmp_path / "s", said)
    then = [*said, 50, 51, 52]
    expected = answer(first, then)
    second = opened(llama, runner=runner, **settings)
    assert second.load_session(tmp_path / "s") == said
    assert second.stats().pages_used == 0
    assert answer(second, then) == expected
    stats = second.stats()
    assert stats.prefix_hit_tokens == len(said)
    assert stats.prefill_tokens + stats.prefix_hit_tokens == len(then)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64])
def test_every_length_is_saved_whole_and_over_what_is_there(llama: Path, tmp_path: Path, n: int) -> None:
    llm = opened(llama)
    (tmp_path / "s").write_text("old")
    llm.save_session(str(tmp_path / "s"), PROMPT[:n])
    assert opened(llama).load_session(str(tmp_path / "s")) == PROMPT[:n]


def test_a_session_is_refused_by_another_model(llama: Path, tmp_path: Path) -> None:
    llm = opened(llama)
    llm.save_session(tmp_path / "s", PROMPT)
    other = saved("llama", tmp_path / "other", seed=1)[1]
    for model, settings in ((other, {}), (llama, {"kv_dtype": "bf16"}), (llama, {"page_tokens": 32})):
        loaded = opened(model, **settings)
        with pytest.raises(ConfigError, match="it holds pages of another model, or computed or held in another way"):
            loaded.load_session(tmp_path / "s")
        assert loaded.stats().pages_cached == 0


def test_any_damage_is_found_and_nothing_of_the_file_is_used(llama: Path, tmp_path: Path) -> None:
    llm = opened(llama)
    said = conversation(llm)
    llm.save_session(tmp_path / "s", said)
    data, fresh = (tmp_path / "s").read_bytes(), opened(llama)
    used = [at for at in range(len(data)) if data[at]]
    r = random.Random(0)
    damaged = [data[:n] for n in (0, 1, 90, 4096, 5000, len(data) // 2, len(data) - 4096)]
    for at in r.sample(used, 60):
        changed = bytearray(data)
        changed[at] ^= 1 << r.randrange(8)
        damaged.append(bytes(changed))
    damaged += [bytes(len(data)), r.randbytes(len(data))]
    for content in damaged:
        (tmp_path / "s").write_bytes(content)
        with pytest.raises((CorruptFileError, ConfigError)):
            fresh.load_session(tmp_path / "s")
        assert fresh.stats().pages_cached == fresh.stats().pages_used == 0
    assert answer(fresh, said) == answer(llm, said)


def test_what_cannot_be_saved_or_loaded_is_said(llama: Path, tmp_path: Path) -> None:
    llm = opened(llama)
    page = llm.engine.pool.n_bytes // llm.engine.pool.n_pages
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be made, because .*file is a file"):
        llm.save_session(tmp_path / "file" / "s", PROMPT)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        llm.load_session(tmp_path / "s")
    with pytest.raises(InputError, match="is not a file"):
        llm.load_session(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a file"):
        llm.load_session(tmp_path / "pipe")
    with pytest.raises(InputError, match="no tokens"):
        llm.save_session(tmp_path / "s", [])
    with pytest.raises(TwostrokeError):
        llm.save_session(tmp_path / "s", PROMPT * 10)  # longer than the context
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]
    llm.save_session(tmp_path / "s", PROMPT)
    small = opened(llama, kv_cache_bytes=2 * page)
    with pytest.raises(CapacityError, match="Raise"):
        small.load_session(tmp_path / "s")
    assert small.stats().pages_cached == small.stats().pages_used == 0
    running = llm.stream([PROMPT], GREEDY)
    next(running)
    with pytest.raises(InputError, match="requests are under way"):
        llm.save_session(tmp_path / "t", PROMPT)
    with pytest.raises(InputError, match="requests are under way"):
        llm.load_session(tmp_path / "s")
    running.close()  # type: ignore[attr-defined]


def test_pages_that_the_cache_has_lost_are_computed_again(llama: Path, tmp_path: Path) -> None:
    llm = opened(llama)
    said = conversation(llm)
    llm.engine.scheduler.pool.discard_content(range(llm.engine.pool.n_pages))
    llm.save_session(tmp_path / "s", said)
    again = opened(llama)
    again.load_session(tmp_path / "s")
    assert answer(again, said) == answer(llm, said)
    assert again.stats().prefix_hit_tokens == len(said) - 1
