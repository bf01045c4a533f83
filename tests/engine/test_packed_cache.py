from __future__ import annotations

import errno
import gc
import io
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import saved
from twostroke.core import private_folder
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.paths import packed_dir
from twostroke.engine import packed_cache
from twostroke.engine.core import EngineCore
from twostroke.engine.packed_cache import Due, Entry, PackedCache, cache_key
from twostroke.evaluation.comparison import model_bytes
from twostroke.kernels.native_library import library
from twostroke.kernels.native_matrix import NativeMatrix
from twostroke.quantization.convert import quantize_model
from twostroke.scheduling.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="the native library was not built")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_cache, "LEAST_KEPT_PACKED_BYTES", 0)
    write = packed_cache._write
    monkeypatch.setattr(packed_cache.threading, "Thread", _AtOnce)
    assert packed_cache._write is write
    return saved("qwen2", tmp_path / "m")[1]  # with biases


class _AtOnce:
    """A thread that has run when it was started."""

    def __init__(self, target: object, args: tuple[object, ...], name: str) -> None:
        self._run = lambda: target(*args)  # type: ignore[operator]

    def start(self) -> None:
        self._run()


def answer(directory: Path, dtype: str = "int8", head: str = "auto") -> tuple[bool, list[int]]:
    core = EngineCore(directory, EngineSettings(dtype=dtype, head_dtype=head, n_threads=1, runner="native"))
    core.add_request("a", [5, 9, 3, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    tokens: list[int] = []
    while core.has_work:
        for event in core.step():
            tokens += event.token_ids
    return core.loaded_packed, tokens


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_the_second_start_reads_what_the_first_packed_and_says_the_same(model: Path, dtype: str) -> None:
    size = model_bytes(model)
    first, second = answer(model, dtype), answer(model, dtype)
    assert (first[0], second[0]) == (False, True)
    assert first[1] == second[1]
    assert model_bytes(model) == size  # what is kept for a faster start is not the model


def mapped_files() -> list[str]:
    """Packed files that this process maps, removed ones included. Engines of earlier tests are gone."""
    gc.collect()
    return [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/packed/" in line]


def sharing(directory: Path, dtype: str = "int8") -> EngineCore:
    return EngineCore(directory, EngineSettings(dtype=dtype, n_threads=1, runner="native", replicas=2))


def said(core: EngineCore) -> list[int]:
    core.add_request("a", [5, 9, 3, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    tokens: list[int] = []
    while core.has_work:
        for event in core.step():
            tokens += event.token_ids
    return tokens


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_engines_that_share_map_one_file_and_say_the_same(model: Path, dtype: str) -> None:
    first, second = sharing(model, dtype), sharing(model, dtype)
    assert (first.loaded_packed, second.loaded_packed) == (False, True)
    (file,) = packed_dir().glob("*.bin")
    assert mapped_files().count(str(file)) == 2, "the first, which packed, has given up its own"
    file.unlink()  # as room is made for others
    third = answer(model, dtype)  # holds its own
    assert said(first) == said(second) == third[1]
    del first, second
    assert not mapped_files(), "a mapping ends with its engine"


def test_an_engine_that_shares_notices_a_damaged_file_and_mends_it(model: Path) -> None:
    expected = said(sharing(model))
    (file,) = packed_dir().glob("*.bin")
    data = bytearray(file.read_bytes())
    data[-70] ^= 1  # in the last matrix: those before it are mapped already
    file.write_bytes(data)
    core = sharing(model)
    assert not core.loaded_packed
    assert said(core) == expected
    assert sharing(model).loaded_packed


def test_an_engine_that_shares_does_without_a_file_that_cannot_be_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "_make_room", lambda *_: False)
    core = sharing(model)
    assert said(core) == answer(model)[1]
    assert not mapped_files()


def test_caches_of_engines_that_share_are_together_as_large_as_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.engine.limits.available_bytes", lambda: 2**24)
    alone = EngineCore(model, EngineSettings(n_threads=1))
    shared = EngineCore(model, EngineSettings(n_threads=1, replicas=4))
    page = alone.kv_cache_bytes // alone.scheduler.config.n_pages
    assert abs(4 * shared.kv_cache_bytes - alone.kv_cache_bytes) <= 4 * page


def test_every_way_to_hold_weights_has_its_own_file(model: Path) -> None:
    assert [answer(model, *ways)[0] for ways in (("int8",), ("int4",), ("int8", "int8"))] == [False] * 3
    assert [answer(model, *ways)[0] for ways in (("int8",), ("int4",), ("int8", "int8"))] == [True] * 3


def test_changed_weights_are_packed_anew(model: Path) -> None:
    answer(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert answer(model)[0] is False


def kept() -> list[Path]:
    return sorted(packed_dir().iterdir()) if packed_dir().is_dir() else []


@pytest.mark.parametrize("damage", ["flip", "truncate", "longer", "empty", "nonsense", "zeros"])
def test_a_damaged_file_is_not_used_and_made_anew(model: Path, damage: str) -> None:
    expected = answer(model)[1]
    (file,) = kept()
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1000] ^= 4
    changed = {
        "truncate": data[:-1],
        "longer": data + b"x",
        "empty": b"",
        "nonsense": b"x" * len(data),
        "zeros": bytes(len(data)),
    }
    file.write_bytes(changed.get(damage, data))
    assert answer(model) == (False, expected)
    assert answer(model) == (True, expected)


KEY = 32 * "a"


def matrices() -> list[NativeMatrix]:
    generator = torch.Generator().manual_seed(0)
    shapes = (("int8", 80, 48), ("int4", 33, 70), ("bf16", 17, 48), ("fp32", 5, 9))
    return [NativeMatrix(torch.randn(n, k, generator=generator), held) for held, n, k in shapes]


def content(matrix: NativeMatrix) -> bytes:
    return packed_cache._memory(matrix).tobytes()


def read_back(made: list[NativeMatrix]) -> tuple[bool, list[bytes]]:
    """What a start with the file that is there gets, and whether all of it came from the file."""
    cache = PackedCache(KEY)
    found = [content(cache.matrix(lambda m=m: m, Due.of(m))) for m in made]  # type: ignore[misc]
    is_read = cache.is_read
    cache._made = []  # nothing is to be written
    cache.finish()
    return is_read, found


def test_every_changed_byte_of_the_header_is_noticed() -> None:
    made = matrices()
    packed_cache._write(KEY, made)
    (file,) = kept()
    expected = [content(m) for m in made]
    assert read_back(made) == (True, expected)
    data = bytearray(file.read_bytes())
    for i in range(len(data) - sum(map(len, expected))):
        data[i] ^= 1 << i % 8
        with file.open("r+b") as stream:
            stream.write(data[:4096])
        assert read_back(made) == (False, expected), i
        data[i] ^= 1 << i % 8


def test_every_changed_byte_of_a_matrix_is_noticed() -> None:
    made = matrices()
    packed_cache._write(KEY, made)
    (file,) = kept()
    expected = [content(m) for m in made]
    n_payload, size = sum(map(len, expected)), file.stat().st_size
    for at in random.Random(0).sample(range(size - n_payload, size), 300):
        with file.open("r+b", buffering=0) as stream:
            (byte,) = os.pread(stream.fileno(), 1, at)
            os.pwrite(stream.fileno(), bytes([byte ^ 1 << at % 8]), at)
            assert read_back(made) == (False, expected), at
            os.pwrite(stream.fileno(), bytes([byte]), at)
    assert read_back(made) == (True, expected)


@pytest.mark.parametrize(
    "told",
    [
        {"n": 70}, {"n": 200_000}, {"k": 40}, {"format": "nonsense"}, {"format": "int8_weight_only"}, {"format": "int4"},
        {"group": 64}, {"format": "int4", "group": 0}, {"n": -1}, {"n": 2**63}, {"k": None}, {"format": ["int8"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_tells_of_another_matrix_is_refused_even_with_a_right_digest(told: dict[str, Any]) -> None:
    made = matrices()
    packed_cache._write(KEY, made)
    (file,) = kept()
    expected = [content(m) for m in made]
    entries = [Entry(Due.of(m), m.packed_bytes, packed_cache._total(packed_cache._memory(m))) for m in made]
    due = vars(entries[0].due) | told
    entries[0] = Entry(Due(**due), entries[0].bytes, entries[0].total)
    file.write_bytes(packed_cache._header(KEY, entries) + b"".join(expected))
    assert read_back(made) == (False, expected)


@pytest.mark.parametrize(
    "table", [b"null", b"7", b"[7]", b"[[]]", b"[[1,2,3,4,{},1]]", b"\xff", b"{", b"[" * 3000, b"[[1,2,3,4,-5,1]]"]
)
def test_a_table_of_other_things_is_refused(table: bytes) -> None:
    made = matrices()
    packed_cache._write(KEY, made)
    (file,) = kept()
    table = table.ljust(4096 - packed_cache._START.size)
    start = packed_cache._START.pack(packed_cache._MAGIC, 4096, packed_cache._digest(KEY, 4096, table))
    file.write_bytes(start + table)
    assert read_back(made) == (False, [content(m) for m in made])


def test_a_file_under_another_key_is_refused() -> None:
    made = matrices()
    packed_cache._write(32 * "b", made)
    (file,) = kept()
    file.rename(file.with_name(f"{KEY}.bin"))
    assert read_back(made)[0] is False


def test_fewer_matrices_than_are_due_are_completed() -> None:
    made = matrices()
    packed_cache._write(KEY, made[:2])
    assert read_back(made) == (False, [content(m) for m in made])


def test_an_int4_directory_with_some_matrices_in_int8_is_read_back(model: Path, tmp_path: Path) -> None:
    quantize_model(model, tmp_path / "q", "int4-g32")
    first, second = answer(tmp_path / "q", "auto"), answer(tmp_path / "q", "auto")
    assert (first[0], second[0]) == (False, True)
    assert first[1] == second[1]


def test_a_group_longer_than_a_row_is_the_directorys_own(model: Path, tmp_path: Path) -> None:
    """48 inputs are one group of 64 or one of 128; only the directory says which."""
    quantize_model(model, tmp_path / "q", "int4-g128")
    assert answer(tmp_path / "q", "auto") == (False, answer(tmp_path / "q", "auto")[1])


def test_a_model_directory_is_neither_read_for_packed_files_nor_written(model: Path) -> None:
    expected = answer(model)[1]
    (file,) = kept()
    old = model / ".packed"
    old.mkdir()
    damaged = bytearray(file.read_bytes())
    for name in (file.name, f"{32 * '0'}.bin", "pytorch_model-1.bin", "thesis.999999.partial"):
        (old / name).write_bytes(damaged)
    before = {f.name: f.read_bytes() for f in old.iterdir()}
    times = {f.name: f.stat().st_mtime_ns for f in model.iterdir()}
    file.unlink()
    assert answer(model) == (False, expected)
    assert {f.name: f.read_bytes() for f in old.iterdir()} == before
    assert {f.name: f.stat().st_mtime_ns for f in model.iterdir()} == times


def test_models_that_agree_in_names_sizes_and_times_have_files_of_their_own(model: Path, tmp_path: Path) -> None:
    """As two fine-tunings do that were unpacked from archives without times."""
    other = saved("qwen2", tmp_path / "other", seed=5)[1]
    for directory in (model, other):
        for file in directory.iterdir():
            os.utime(file, ns=(1, 1))
    texts = answer(model)[1], answer(other)[1]
    assert texts[0] != texts[1]
    assert (answer(model)[1], answer(other)[1]) == texts


def test_weights_replaced_in_place_with_their_time_put_back_are_packed_anew(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    status, first = weights.stat(), answer(model)[1]
    shutil.copyfile(saved("qwen2", tmp_path / "other", seed=5)[1] / "model.safetensors", weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size
    again = answer(model)
    assert again[0] is False
    assert again[1] != first


def test_links_and_pipes_are_not_followed_and_what_they_point_to_stays(model: Path, tmp_path: Path) -> None:
    expected = answer(model)[1]
    (file,) = kept()
    precious = tmp_path / "thesis"
    shutil.move(file, precious)
    content = precious.read_bytes()
    file.symlink_to(precious)
    assert answer(model) == (False, expected)  # though its bytes are right
    assert not file.is_symlink()
    assert precious.read_bytes() == content
    file.unlink()
    os.mkfifo(file)
    assert answer(model) == (False, expected)


def test_a_folder_behind_a_link_or_open_to_others_is_not_used(model: Path, tmp_path: Path) -> None:
    expected = answer(model)[1]
    elsewhere = tmp_path / "elsewhere"
    shutil.move(packed_dir(), elsewhere)
    (elsewhere / "pytorch_model-1.bin").write_bytes(b"weights")
    before = sorted(elsewhere.iterdir())
    packed_dir().symlink_to(elsewhere)
    assert answer(model) == (False, expected)
    assert sorted(elsewhere.iterdir()) == before
    packed_dir().unlink()
    shutil.move(elsewhere, packed_dir())
    packed_dir().chmod(0o777)
    assert answer(model) == (False, expected)
    packed_dir().chmod(0o700)
    assert answer(model) == (True, expected)


def test_another_users_files_are_not_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(model)[1]
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: os.getuid() + 1)
    assert answer(model) == (False, expected)


def test_folder_and_files_are_for_this_user_alone(model: Path) -> None:
    before = os.umask(0)
    try:
        answer(model)
    finally:
        os.umask(before)
    assert [f.stat().st_mode & 0o777 for f in (packed_dir(), *kept())] == [0o700, 0o600]


def test_the_least_recently_used_files_go_by_number(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MAX_FILES", 2)
    for dtype in ("bf16", "int8"):
        answer(model, dtype)
    files = dict(zip(("bf16", "int8"), sorted(kept(), key=lambda f: f.stat().st_mtime_ns), strict=True))
    for i, file in enumerate(files.values()):
        os.utime(file, (i + 1, i + 1))
    assert answer(model, "bf16")[0] is True  # used, so that the other is the older now
    answer(model, "int4")
    assert files["bf16"] in kept()
    assert len(kept()) == 2


def test_the_least_recently_used_files_go_by_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(model, "int8")
    (file,) = kept()
    monkeypatch.setattr(packed_cache, "MAX_BYTES", file.stat().st_size + 4096)
    answer(model, "int4")
    (left,) = kept()
    assert left != file
    monkeypatch.setattr(packed_cache, "MAX_BYTES", 4096)
    assert answer(model, "bf16")[0] is False
    assert kept() == [left]  # one that is too large alone removes nothing


def test_only_names_of_its_own_are_removed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MAX_FILES", 1)
    packed_dir().mkdir(mode=0o700)
    dead, living = f"{KEY}.{2**22 + 1}.{16 * '0'}.partial", f"{KEY}.{os.getpid()}.{16 * '0'}.partial"
    names = (dead, living, f"{KEY}.bin", "pytorch_model-1.bin", f"{KEY}.bin.old", "thesis.999999.partial")
    for name in names:
        (packed_dir() / name).write_bytes(b"x")
        os.utime(packed_dir() / name, (1, 1))
    answer(model)
    left = {f.name for f in kept()}
    assert {name for name in names if name not in left} == {dead, f"{KEY}.bin"}


@pytest.mark.parametrize("obstacle", ["file", "home"])
def test_a_home_that_cannot_be_written_costs_nothing_but_time(
    model: Path, obstacle: str, twostroke_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "file":
        packed_dir().write_text("a file where the folder should be")
    else:  # root may write where it says read-only, so a file stands for such a home
        (twostroke_home / "home").write_text("not a folder")
        monkeypatch.setenv("TWOSTROKE_HOME", str(twostroke_home / "home" / "inside"))
    expected = answer(model)[1]
    assert answer(model) == (False, expected)


def test_a_folder_that_is_gone_has_no_key(tmp_path: Path) -> None:
    assert cache_key(tmp_path / "nowhere", "int8") is None
    assert PackedCache(None).finish() is None


def test_a_disk_that_fills_up_leaves_nothing_half_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(model)[1]
    kept()[0].unlink()

    class Filling(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    create = private_folder.PrivateFolder.create

    def filling(folder: private_folder.PrivateFolder, name: str) -> Any:
        create(folder, name).close()
        return Filling()

    monkeypatch.setattr(private_folder.PrivateFolder, "create", filling)
    assert answer(model) == (False, expected)
    assert not kept()


def test_too_little_room_is_not_filled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(model)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda path: usage._replace(free=2**10))
    expected = answer(model)[1]
    assert answer(model) == (False, expected)
    assert not kept()


def test_a_matrix_is_read_whole_though_the_system_gives_it_in_parts() -> None:
    made = matrices()
    packed_cache._write(KEY, made)

    class Short:
        def __init__(self, stream: Any) -> None:
            self.stream, self.close = stream, stream.close

        def readinto(self, buffer: memoryview) -> int:
            return int(self.stream.readinto(buffer[:1000]))

    cache = PackedCache(KEY)
    assert cache._stream is not None
    cache._stream = Short(cache._stream)  # type: ignore[assignment]
    assert [content(cache.matrix(lambda m=m: m, Due.of(m))) for m in made] == [content(m) for m in made]  # type: ignore[misc]
    assert cache.is_read
    cache._made = []
    cache.finish()
