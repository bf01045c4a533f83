"""Prefixes that were written to a directory give every later answer its tokens, whatever happens to the file."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_models import models as lora_models

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.schemes import ASKED, CACHE_TYPES
from twostroke.engine.core import EngineCore
from twostroke.engine.speculation.lengths import StepTimes
from twostroke.engine.tiers import disk, page_file
from twostroke.engine.tiers.disk import PageStore, _Writer
from twostroke.engine.tiers.images import Bytes, PageImages
from twostroke.engine.tiers.load_times import Load, LoadTimes, PromptTimes
from twostroke.engine.tiers.page_file import Entry, PageFile
from twostroke.kernels.native_library import library
from twostroke.scheduling.prefix_tree import PrefixTree
from twostroke.scheduling.sampling_params import SamplingParams

# Torch's products in other formats depend on the number of rows, so that any prefix hit may change the last bits.
KINDS = [("fp32", kv, "torch") for kv in CACHE_TYPES]
if library() is not None:
    KINDS += [(weights, "auto", "native") for weights in ASKED]
    KINDS += [(weights, kv, "native") for weights in ("bf16", "int8") for kv in CACHE_TYPES]
SHARED = [5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 3, 4, 4, 4, 12, 13, 71] * 3
PROMPTS = [[*SHARED, 30, 31], [*SHARED[:40], 77, 78, 79], [*range(2, 52)]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


class Fixed(PromptTimes):
    """Times of prompts that no step corrects, so that a test does not depend on the machine's load."""

    def saw(self, rows: int, seconds: float) -> None:
        pass


def per_row(seconds: float) -> PromptTimes:
    return Fixed(StepTimes(lambda rows: rows * seconds, 512))


def per_page(seconds: float) -> LoadTimes:
    """Of pages that need no wait for the disk."""
    times = LoadTimes(1)
    times.saw(Load(n=2, work_s=2 * seconds, first_wait_s=0.0, n_behind=1, behind_s=0.0))
    return times


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama")[1]


def opened(model: Path, folder: Path | None, **settings: Any) -> EngineCore:
    """An engine that loads whatever is in ``folder``."""
    own = {"n_threads": 1, "dtype": "fp32", "kv_cache_bytes": 2**20, "kv_dir": None if folder is None else str(folder)}
    core = EngineCore(model, EngineSettings(**{**own, **settings}))
    if core._below.disk is not None:
        core._below.disk.times = per_row(1.0)
    return core


def run(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY, lora: str | None = None) -> Any:
    """Of every prompt the tokens of its answer and their log-probabilities; of torch, whose last bits depend on the number of
    rows, the tokens."""
    found: dict[str, tuple[list[int], list[Any]]] = {str(i): ([], []) for i in range(len(prompts))}
    for name, prompt in zip(found, prompts, strict=True):
        core.add_request(name, list(prompt), params, lora=lora)
    while core.has_work:
        for event in core.step():
            found[event.request_id][0].extend(event.token_ids)
            found[event.request_id][1].extend(event.logprobs or ())
    return found if core.runner == "native" else {name: (tokens, []) for name, (tokens, _) in found.items()}


def one_by_one(core: EngineCore, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Any]:
    return [run(core, [prompt]) for prompt in prompts]


def filled(model: Path, folder: Path, **settings: Any) -> list[Any]:
    """The answers of an engine that left its pages in ``folder``, which are those of one without a folder."""
    plain = one_by_one(opened(model, None, **settings))
    core = opened(model, folder, **settings)
    assert one_by_one(core) == plain
    core.close()
    return plain


def only_file(folder: Path) -> Path:
    (found,) = folder.glob("*.kv")
    return found


@pytest.mark.parametrize(("weights", "kv", "runner"), KINDS)
def test_a_new_engine_answers_from_disk_as_without(tmp_path: Path, weights: str, kv: str, runner: str) -> None:
    model = saved("llama", tmp_path / "m", d_model=64, n_heads=4, head_dim=32, d_ff=128)[1]
    settings = {"dtype": weights, "kv_dtype": kv, "runner": runner}
    plain = filled(model, tmp_path / "kv", **settings)
    core = opened(model, tmp_path / "kv", **settings)
    assert one_by_one(core) == plain
    stats = core.stats()
    assert stats.disk_hit_tokens >= 48 + 48  # the second finds what the first loaded
    assert stats.prefix_hit_tokens == stats.disk_hit_tokens + 32 + 8  # the second parts from the first within a page
    assert stats.disk_pages_damaged == 0
    assert stats.disk_load_s > 0


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma2", "olmoe", "deepseek_v3"])
def test_families_with_windows_experts_and_latents_answer_alike(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "m")[1]
    plain = filled(model, tmp_path / "kv")
    core = opened(model, tmp_path / "kv")
    assert one_by_one(core) == plain
    assert core.stats().disk_hit_tokens > 0


def test_pages_that_left_a_small_cache_come_back_from_disk(llama: Path, tmp_path: Path) -> None:
    page = opened(llama, None).pool.n_bytes // opened(llama, None).pool.n_pages
    small = {"kv_cache_bytes": 8 * page, "max_model_len": 100}
    prompts = [*PROMPTS, [*range(20, 80)]] * 3
    plain = one_by_one(opened(llama, None, **small), prompts)
    core = opened(llama, tmp_path, **small)
    answers = []
    for prompt in prompts:
        answers.append(run(core, [prompt]))
        assert core._below.disk is not None
        core._below.disk.wait_written()
    assert answers == plain
    assert core.stats().disk_hit_tokens >= 96


def test_loads_share_steps_with_requests_that_decode(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = filled(llama, tmp_path)
    monkeypatch.setattr(disk, "_SLICE_S", 0.0)  # a page a step
    core = opened(llama, tmp_path)
    core.add_request("decodes", [70, 71, 72], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    core.step()
    core.add_request("loads", PROMPTS[0], GREEDY)
    n_steps, tokens = 0, []
    while len(tokens) < GREEDY.max_tokens:
        events = core.step()
        assert any(event.request_id == "decodes" for event in events)
        tokens += [token for event in events if event.request_id == "loads" for token in event.token_ids]
        n_steps += 1
    assert tokens == plain[0]["0"][0]
    assert n_steps == 2 + GREEDY.max_tokens  # three pages in three steps, the last of which computes the rest


def _flip(at: Callable[[PageFile, int], int]) -> Callable[[Path, PageFile], None]:
    def damage(path: Path, file: PageFile) -> None:
        data = bytearray(path.read_bytes())
        for slot in range(20):
            if at(file, slot) < len(data):
                data[at(file, slot)] ^= 4
        path.write_bytes(data)

    return damage


def _cut(share: float) -> Callable[[Path, PageFile], None]:
    return lambda path, file: os.truncate(path, int(path.stat().st_size * share))


def _swap(path: Path, file: PageFile) -> None:
    """Entries of two slots, each whole."""
    data = bytearray(path.read_bytes())
    a, b = (slice(file._entry_at(slot), file._entry_at(slot) + 64) for slot in (0, 2))
    data[a], data[b] = data[b], data[a]
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, PageFile], None]] = {
    "header": _flip(lambda file, slot: slot),
    "identity": _flip(lambda file, slot: 40 + slot),
    "table": _flip(lambda file, slot: file._entry_at(slot) + slot),
    "tokens": _flip(lambda file, slot: file._record_at(slot) + 8),
    "values": _flip(lambda file, slot: file._record_at(slot) + 900),
    "half": _cut(0.5),
    "a few bytes": _cut(0.001),
    "entries swapped": _swap,
    "zeros": lambda path, file: path.write_bytes(bytes(path.stat().st_size)),
    "noise": lambda path, file: path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size)),
    "empty": lambda path, file: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_loses_nothing_but_hits(llama: Path, tmp_path: Path, damage: str) -> None:
    plain = filled(llama, tmp_path)
    core = opened(llama, None)
    file = PageFile(-1, b"", 16, core.pool.images().n_bytes)
    DAMAGE[damage](only_file(tmp_path), file)
    core = opened(llama, tmp_path)
    assert one_by_one(core) == plain
    assert core.stats().disk_hit_tokens < 96
    core.close()
    again = opened(llama, tmp_path)  # and the file is whole again
    assert one_by_one(again) == plain
    assert again.stats().disk_hit_tokens >= 96
    assert again.stats().disk_pages_damaged == 0


def test_damage_while_the_engine_runs_loses_nothing_but_hits(llama: Path, tmp_path: Path) -> None:
    plain = filled(llama, tmp_path)
    core = opened(llama, tmp_path)
    file = only_file(tmp_path)
    DAMAGE["values"](file, core._below.disk._store.file)  # type: ignore[union-attr]
    assert one_by_one(core) == plain
    assert core.stats().disk_pages_damaged > 0
    os.truncate(file, 0)
    assert one_by_one(core) == plain


def test_a_folder_that_is_removed_ends_writing(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = filled(llama, tmp_path / "kv")
    core = opened(llama, tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    assert one_by_one(core) == plain
    core.close()
    assert "no further pages are kept in --kv-dir: the file was removed." in caplog.text


def test_a_full_disk_ends_growth(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = one_by_one(opened(llama, None))
    core = opened(llama, tmp_path)
    assert core._below.disk is not None
    file, write = core._below.disk._store.file, page_file._write_all
    end = file._record_at(3)

    def full(descriptor: int, data: Bytes, at: int) -> None:
        if at >= end:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, data, at)

    monkeypatch.setattr(page_file, "_write_all", full)
    assert one_by_one(core) == plain
    core._below.disk.wait_written()
    assert core.stats().disk_pages == 3
    assert one_by_one(core) == plain
    core.close()
    assert caplog.text.count("is full: its 3 pages make room for one another") == 1
    again = opened(llama, tmp_path)
    assert again.stats().disk_pages == 3
    assert one_by_one(again) == plain


def test_two_engines_do_not_share_a_file(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(llama, tmp_path)
    second = opened(llama, tmp_path)
    assert second._below.disk is None
    assert "another process keeps its pages in" in caplog.text
    assert one_by_one(first) == one_by_one(second)
    first.close()
    assert opened(llama, tmp_path)._below.disk is not None


def test_another_models_or_another_forms_file_is_not_read(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(llama, tmp_path / "kv")
    other = saved("llama", tmp_path / "other", seed=1)[1]
    changes = [{"kv_dtype": "bf16"}, {"page_tokens": 32}, {"dtype": "bf16"}]
    for model, settings in ((other, {}), *((llama, change) for change in changes)):
        caplog.clear()
        plain = one_by_one(opened(model, None, **settings))
        core = opened(model, tmp_path / "kv", **settings)
        assert "also holds" in caplog.text
        assert one_by_one(core)[0] == plain[0]
        assert core.stats().disk_hit_tokens == 0
        core.close()
    name = opened(other, tmp_path / "new").identity.hex()[:32] + ".kv"
    shutil.copy(tmp_path / "kv" / (opened(llama, None).identity.hex()[:32] + ".kv"), tmp_path / "new" / name)
    caplog.clear()
    renamed = opened(other, tmp_path / "new")
    assert renamed._below.disk is None
    assert "it holds pages of another model, or computed or held in another way." in caplog.text


def test_a_file_stays_within_its_limit_and_keeps_starts_of_prefixes(llama: Path, tmp_path: Path) -> None:
    images = opened(llama, None).pool.images()
    limit = 2**16
    core = opened(llama, tmp_path, kv_dir_bytes=limit)
    assert core._below.disk is not None
    store = core._below.disk._store
    assert store.n_most == PageFile(-1, b"", 16, images.n_bytes).slots_within(limit) < 9
    for i in range(30):
        run(core, [[i + 2] * 50])
        core._below.disk.wait_written()
    run(core, [PROMPTS[0]])
    core.close()
    assert only_file(tmp_path).stat().st_size <= limit
    again = opened(llama, tmp_path, kv_dir_bytes=limit // 2)
    assert only_file(tmp_path).stat().st_size <= limit // 2
    assert again.stats().disk_pages > 0
    assert one_by_one(again) == one_by_one(opened(llama, None))


def test_requests_of_adapters_find_nothing_on_disk(tmp_path: Path) -> None:
    base, (a, b), _ = lora_models("llama", tmp_path, 2)
    core = opened(base, tmp_path / "kv")
    core.load_adapter("it", a)
    first = run(core, [PROMPTS[0]], lora="it")
    core.close()
    core = opened(base, tmp_path / "kv")
    core.load_adapter("it", b)
    assert run(core, [PROMPTS[0]], lora="it") != first
    assert core.stats().disk_pages == core.stats().disk_hit_tokens == 0


def test_loading_that_is_slower_than_computing_is_refused_and_tried_again(llama: Path, tmp_path: Path) -> None:
    plain = filled(llama, tmp_path)
    core = opened(llama, tmp_path)
    tier = core._below.disk
    assert tier is not None
    tier.times, tier.loads = per_row(1e-3), per_page(16e-3 / disk._LEAST_GAIN * 1.15)
    while core.stats().disk_loads_refused < disk._RENEWED:
        assert run(core, [PROMPTS[0]]) == plain[0]
        assert core.stats().disk_hit_tokens == 0
        core.scheduler.pool.discard_content(range(core.pool.n_pages))
    tier.wait_written()  # the writing thread has read the pages meanwhile
    assert run(core, [PROMPTS[0]]) == plain[0]
    assert core.stats().disk_hit_tokens == 48
    assert tier.loads.work_s is not None
    assert tier.loads.work_s < 16e-3  # what was measured


def test_loading_stops_once_the_disk_is_too_slow(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [*range(2, 90)] * 2
    core = opened(llama, tmp_path)
    plain = run(core, [long])
    core.close()
    core = opened(llama, tmp_path)
    assert core._below.disk is not None
    core._below.disk.times = per_row(1e-9)
    core._below.disk.loads = per_page(0.0)
    assert run(core, [long]) == plain
    assert core.stats().disk_hit_tokens == disk._CHECKED_EVERY * 16


def test_a_page_that_is_written_anew_while_it_is_copied_is_not_kept(tmp_path: Path) -> None:
    class Overtaken(PageImages):
        def copy_out(self, page: int, into: Bytes) -> None:
            super().copy_out(page, into)
            if page == 1:
                tree.remove(page)
                tree.insert(b"1" * 16, [3, 4], page, b"0" * 16)

    tree = PrefixTree()
    images = Overtaken([np.arange(64, dtype=np.uint8).reshape(2, 4, 8)])
    file = PageFile(os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT), bytes(32), 2, images.n_bytes)
    file.begin()
    store = PageStore(file, 2**20)
    for i in range(3):
        tree.insert(bytes([48 + i]) * 16, [3, 4], i, b"")
    writer = _Writer(store, tree, images)
    writer.jobs.put(partial(writer.write, [b"0" * 16, b"1" * 16, b"2" * 16]))
    writer.jobs.put(None)
    writer.run()
    assert [key in store for key in (b"0" * 16, b"1" * 16, b"2" * 16)] == [True, False, False]
    file.close()


def test_slots_fill_what_they_may(tmp_path: Path) -> None:
    file = PageFile(os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT), bytes(32), 2, 5000)
    file.begin()
    for n in (1, 2, 63, 64, 65, 128, 200):
        file.cut(10**6)
        file.write(n - 1, b"k" * 16, 1, file.records.record())
        size = os.fstat(file.descriptor).st_size
        whole = -(-size // 4096) * 4096
        assert file.slots_within(whole) == n
        assert file.slots_within(whole - 1) < n
        assert sum(entry is not None for entry in file.entries(1000)) >= 1
        assert file.entries(1000)[n - 1] == Entry(b"k" * 16, 1, 0, file.records.sums(b"k" * 16, file.records.record())[1])
    file.close()


def test_a_folder_that_cannot_be_used_is_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_dir='.*file' is not a directory\."):
        opened(llama, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"kv_dir='.*below' cannot be used: .*\. Name another directory\."):
        opened(llama, tmp_path / "file" / "below")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="belong to this user and be writable by nobody else"):
        opened(llama, tmp_path / "open")
    with pytest.raises(ConfigError, match=r"kv_dir_bytes=5000 is less than a file of one page"):
        opened(llama, tmp_path / "kv", kv_dir_bytes=5000)
    with pytest.raises(ConfigError, match=r"kv_dir='' must be the path of a directory"):
        EngineSettings(kv_dir="")
    if library() is not None:
        with pytest.raises(ConfigError, match="page_tokens=4 must be a multiple of 16"):
            opened(llama, tmp_path / "kv", runner="native", page_tokens=4)


def test_the_draft_model_keeps_nothing(llama: Path, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("drafts need the native runner")
    core = opened(llama, tmp_path, speculate=f"draft:{llama}")
    run(core, [PROMPTS[0]])
    core.close()
    assert only_file(tmp_path).name.startswith(core.identity.hex()[:32])
    assert core.stats().disk_pages == 0
