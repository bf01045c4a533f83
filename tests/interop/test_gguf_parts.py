"""Models in several GGUF files, written by llama.cpp's own ``gguf`` package: the same model as in one, or a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_files import finish, small_file
from twostroke.cli.opened_model import opened_model
from twostroke.core.errors import CorruptFileError, InputError
from twostroke.interop.gguf_model import read_gguf
from twostroke.interop.gguf_parts import names_of_parts, open_gguf
from twostroke.interop.import_model import import_model


@pytest.mark.parametrize("architecture", ["gemma3", "phi3"])
def test_a_split_model_is_the_same_as_in_one_file(architecture: str, tmp_path: Path) -> None:
    whole = read_gguf(small_file(tmp_path / "whole.gguf", architecture))
    first = small_file(tmp_path / "m.gguf", architecture, in_each=4)
    names = names_of_parts(first.name)
    assert len(names) >= 4
    for name in (names[0], names[2]):
        split = read_gguf(tmp_path / name)
        assert (split.spec, split.notes) == (whole.spec, whole.notes)
        assert all(torch.equal(split.state[tensor], whole.state[tensor]) for tensor in whole.state)
        assert split.codes is not None
        assert whole.codes is not None
        assert all(bytes(_flat(split.codes.read(n))) == bytes(_flat(whole.codes.read(n))) for n in whole.codes.kinds)


def _flat(rows: memoryview | torch.Tensor) -> memoryview:
    return rows if isinstance(rows, memoryview) else rows.numpy().reshape(-1).data


def test_tensors_are_mapped_from_their_own_part(tmp_path: Path) -> None:
    first = small_file(tmp_path / "m.gguf", "phi3", in_each=3)
    mapped = {id(info.data) for info in open_gguf(first).tensors.values()}
    assert len(mapped) == len(names_of_parts(first.name))


def test_a_split_model_is_imported_and_served_by_its_first_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    first = small_file(tmp_path / "m.gguf", "gemma3", in_each=6)
    import_model(small_file(tmp_path / "whole.gguf", "gemma3"), tmp_path / "whole")
    directory = opened_model(first)
    weights = (directory / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "whole" / "model.safetensors").read_bytes()
    written = (directory / "config.json").stat().st_mtime_ns
    assert opened_model(first) == directory
    assert (directory / "config.json").stat().st_mtime_ns == written
    other = tmp_path / names_of_parts(first.name)[1]
    other.write_bytes(other.read_bytes())  # a part that changed
    opened_model(first)
    assert (directory / "config.json").stat().st_mtime_ns > written


def test_links_to_parts_are_followed_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Hub's cache has them: the files themselves are called by their hashes."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    first = small_file(tmp_path / "m.gguf", "phi3", in_each=6)
    (tmp_path / "links").mkdir()
    for i, name in enumerate(names_of_parts(first.name)):
        (tmp_path / name).rename(tmp_path / f"blob{i}")
        (tmp_path / "links" / name).symlink_to(tmp_path / f"blob{i}")
    assert (opened_model(tmp_path / "links" / first.name) / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("m.gguf", 1), ("m-00001-of-00003.gguf", 3), ("m-00003-of-00003.gguf", 3), ("m-00004-of-00003.gguf", 1),
        ("m-00000-of-00003.gguf", 1), ("m-1-of-3.gguf", 1), ("-00001-of-00001.gguf", 1),
    ],
)  # fmt: skip
def test_names_of_parts(name: str, parts: int) -> None:
    assert len(names_of_parts(name)) == parts
    assert name in names_of_parts(name)


def part(path: Path, number: int, count: int, tensors: tuple[str, ...], total: int | None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    if total is not None:
        writer.add_int32("split.tensors.count", total)
    for name in tensors:
        writer.add_tensor(name, np.zeros(32, np.float32))
    finish(writer)


def two_parts(folder: Path, second: int = 1, count: int = 2, tensors: tuple[str, ...] = ("b",), total: int | None = 2) -> Path:
    part(folder / "m-00001-of-00002.gguf", 0, 2, ("a",), 2)
    part(folder / "m-00002-of-00002.gguf", second, count, tensors, total)
    return folder / "m-00001-of-00002.gguf"


def removed(folder: Path) -> Path:
    first = two_parts(folder)
    (folder / "m-00002-of-00002.gguf").unlink()
    return first


def renamed(folder: Path) -> Path:
    return Path(shutil.copyfile(two_parts(folder), folder / "model.gguf"))


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (removed, InputError, "is one of 2 parts, of which 1 are not beside it: m-00002-of-00002.gguf. Download"),
        (renamed, InputError, "one of 2 parts by its metadata, and one of 1 by its name"),
        (lambda f: two_parts(f, second=0), CorruptFileError, r"part 2 of 2 by its name, but its metadata say split.no=0"),
        (lambda f: two_parts(f, count=3), CorruptFileError, r"split.count=3"),
        (lambda f: two_parts(f, tensors=("a",)), CorruptFileError, r"tensor 'a' is in an earlier part too"),
        (
            lambda f: two_parts(f, tensors=("b", "c")),
            CorruptFileError,
            "tensors.count=2, but its 2 parts hold 3 tensors",
        ),
        (lambda f: two_parts(f, total=7), CorruptFileError, r"m-00002-of-00002.gguf: metadata split.tensors.count=7"),
    ],
    ids=["missing", "renamed", "number", "count", "twice", "more", "total"],
)
def test_parts_that_are_not_those_of_one_model_are_a_sentence(
    make: Callable[[Path], Path], error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        open_gguf(make(tmp_path))
    assert sentence in str(caught.value)


def test_a_count_of_tensors_may_be_left_out(tmp_path: Path) -> None:
    assert set(open_gguf(two_parts(tmp_path, total=None)).tensors) == {"a", "b"}
