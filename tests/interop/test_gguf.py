"""The GGUF reader against llama.cpp's own writer and dequantiser, and against files that lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import SCALES_AT, TYPES, finish, quantised, random_blocks
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.schemes import SCHEMES
from twostroke.interop.gguf import GgufFile
from twostroke.model.published.gguf_blocks import BLOCKS
from twostroke.model.published.gguf_types import TYPES as READ
from twostroke.model.published.gguf_types import codes_of, dequantise


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A file with one tensor of each type that is read and metadata of many types; the numbers that its tensors stand for."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("count", 7)
    writer.add_int64("negative", -5)
    writer.add_float32("number", 0.25)
    writer.add_bool("flag", True)
    writer.add_string("text", "grüße")
    writer.add_array("numbers", [1.5, 2.5, -3.0])
    writer.add_array("texts", ["a", "", "ü"])
    rng = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for name in TYPES:
        array = (rng.standard_normal((15, 512)) * rng.lognormal(0, 2, (15, 1))).astype(np.float32)
        raw, exact = quantised(array, name)
        values[name] = exact.reshape(3, 5, 512)
        writer.add_tensor(name, raw.reshape(3, 5, -1), raw_dtype=gguf.GGMLQuantizationType[name])
    finish(writer)
    return path, values


def test_every_supported_type_reads_as_llama_cpp_dequantises_it(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, values = written
    file = GgufFile(path)
    assert set(file.tensors) == set(TYPES)
    for name, expected in values.items():
        tensor = file.read(name)
        assert tensor.shape == expected.shape
        assert torch.equal(tensor.float(), torch.from_numpy(expected)), name
    assert file.read("BF16").dtype == torch.bfloat16
    assert file.read("F16").dtype == torch.float16


def test_metadata_of_every_kind_is_read(written: tuple[Path, Any]) -> None:
    metadata = GgufFile(written[0]).metadata
    assert metadata["general.architecture"] == "llama"
    assert (metadata["count"], metadata["negative"], metadata["number"], metadata["flag"]) == (7, -5, 0.25, True)
    assert metadata["text"] == "grüße"
    assert metadata["numbers"].tolist() == [1.5, 2.5, -3.0]
    assert metadata["texts"] == ["a", "", "ü"]


def test_every_type_that_is_read_is_tested() -> None:
    assert set(READ) == set(TYPES)


@pytest.mark.parametrize("name", SCALES_AT)
def test_blocks_of_any_bits_are_the_numbers_of_llama_cpp(name: str) -> None:
    """Scales of any bits too: where one is not finite, neither is what it makes."""
    kind = gguf.GGMLQuantizationType[name]
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert (READ[name].number, READ[name].n_values, READ[name].n_bytes) == (kind, n_values, n_bytes)
    raw = np.random.default_rng(0).integers(0, 256, (2000, n_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(raw, kind)).flatten()
    found, finite = dequantise(READ[name], raw.reshape(-1)), expected.isfinite()
    assert torch.equal(found[finite].view(torch.int32), expected[finite].view(torch.int32))
    assert not found[~finite].isfinite().any()
    rounded = dequantise(READ[name], raw.reshape(-1), torch.bfloat16)
    wanted = expected.bfloat16()
    assert torch.equal(rounded[wanted.isfinite()], wanted[wanted.isfinite()])
    assert not rounded[~wanted.isfinite()].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantising_takes_the_values_and_little_more(dtype: torch.dtype) -> None:
    kind = READ["Q4_K"]
    block = np.zeros(kind.n_bytes, dtype=np.uint8)
    block[1], block[4:8], block[16:] = 0x3C, 1, 0x21  # a scale of 1, the first four groups' 1, codes 1 and 2
    raw = np.tile(block, 200_001)  # and a piece that is not full
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    values = dequantise(kind, raw, dtype)
    taken = resident_bytes("VmHWM") - before
    expected = torch.tensor([1.0] * 32 + [2.0] * 32 + [1.0] * 32 + [2.0] * 32 + [0.0] * 128, dtype=dtype)
    assert torch.equal(values.view(-1, 256), expected.expand(200_001, 256))
    assert taken < values.nbytes + 16_000_000  # of 205 MB in fp32


def resident_bytes(key: str) -> int:
    """Memory of this process now (VmRSS), or at most since the mark was reset (VmHWM)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024


def test_threads_make_the_same_numbers() -> None:
    raw = np.random.default_rng(0).integers(0, 100, READ["Q6_K"].n_bytes * 3_000, dtype=np.uint8)
    alone = dequantise(READ["Q6_K"], raw)
    torch.set_num_threads(3)
    try:
        assert torch.equal(dequantise(READ["Q6_K"], raw), alone)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor_row(name: str = "t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(*, version: int = 3, tensors: list[bytes] | None = None, fields: list[bytes] | None = None,
               n_tensors: int | None = None, n_fields: int | None = None, data: int = 128) -> bytes:  # fmt: skip
    tensors, fields = tensors or [], fields or []
    counts = (len(tensors) if n_tensors is None else n_tensors, len(fields) if n_fields is None else n_fields)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


U8_ARRAY = struct.pack("<IIQ", 9, 0, 2**60)
HUGE_TEXTS = struct.pack("<IIQ", 9, 8, 2**40)
EMPTY_ARRAYS = struct.pack("<IIQ", 9, 9, 1000) + struct.pack("<IQ", 0, 0) * 1000
EMPTY_TEXTS = struct.pack("<IIQ", 9, 8, 900_000) + bytes(8 * 900_000)
LONG_TEXT = struct.pack("<I", 8) + text("x" * (2**22 + 1))
NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQB", 0, 1, 0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is 0 bytes"),
        (b"GGUF" + bytes(10), "is 14 bytes"),
        (b"GGML" + bytes(50), "it is not a GGUF file"),
        (gguf_bytes(version=1), "version 1"),
        (gguf_bytes(version=0x03000000), "big-endian"),
        (gguf_bytes(n_tensors=2**62), "the number of tensors is 4611686018427387904"),
        (gguf_bytes(n_fields=2**40), "the number of metadata fields is 1099511627776"),
        (gguf_bytes(fields=[struct.pack("<Q", 2**63) + bytes(20)]), "the length of a metadata key is 9223372036854775808"),
        (gguf_bytes(fields=[text("k") + U8_ARRAY]), "the number of elements of metadata 'k' is 1152921504606846976"),
        (gguf_bytes(fields=[text("k") + HUGE_TEXTS]), "the number of elements of metadata 'k' is 1099511627776"),
        (gguf_bytes(fields=[text("k") + NESTED]), "is an array of value type 9"),
        (gguf_bytes(fields=[text("k") + EMPTY_ARRAYS]), "is an array of value type 9"),
        pytest.param(gguf_bytes(fields=[text("k") + EMPTY_TEXTS]), "bytes of memory", id="empty texts"),
        pytest.param(gguf_bytes(fields=[text("k" * 70_000) + struct.pack("<IB", 0, 1)]), "has 70000 bytes", id="a long key"),
        pytest.param(gguf_bytes(fields=[text("k") + LONG_TEXT]), "has 4194305 bytes", id="a long text"),
        (gguf_bytes(fields=[text("k") + struct.pack("<I", 77) + bytes(8)]), "value type 77"),
        (gguf_bytes(fields=[text("k") + struct.pack("<IB", 0, 1)] * 2), "occurs twice"),
        (gguf_bytes(fields=[text(b"\xff\xfe") + struct.pack("<IB", 0, 1)]), "is not UTF-8"),
        (gguf_bytes(fields=[text("general.alignment") + struct.pack("<II", 4, 0)]), "general.alignment=0"),
        (gguf_bytes(tensors=[tensor_row(shape=(2,) * 9)]), "has 9 dimensions"),
        (gguf_bytes(tensors=[text("t") + struct.pack("<IIQ", 0, 0, 0) + bytes(8)]), "has 0 dimensions"),
        (gguf_bytes(tensors=[tensor_row(shape=(0,))]), "has shape [0]"),
        (gguf_bytes(tensors=[tensor_row(shape=(33,), kind=8)]), "whole blocks of 32"),
        (gguf_bytes(tensors=[tensor_row(shape=(2**40, 2**20))]), "The file is truncated"),
        (gguf_bytes(tensors=[tensor_row(offset=2**60)]), "The file is truncated"),
        (gguf_bytes(tensors=[tensor_row(offset=7)]), "misaligned"),
        (gguf_bytes(tensors=[tensor_row("a"), tensor_row("b", offset=32)], data=999), "overlaps"),
        (gguf_bytes(tensors=[tensor_row("a"), tensor_row("a", offset=128)], data=999), "occurs twice"),
        (gguf_bytes(tensors=[tensor_row()], data=100), "The file is truncated"),
    ],
)
def test_files_that_lie_are_found_before_anything_is_allocated(content: bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"x\.gguf") as caught:
        GgufFile(file)
    assert sentence in str(caught.value)


def test_a_file_made_by_these_helpers_is_legal_when_it_does_not_lie(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_bytes(tensors=[tensor_row()], fields=[text("k") + struct.pack("<IB", 0, 1)]))
    assert torch.equal(GgufFile(file).read("t"), torch.zeros(32))


@pytest.mark.parametrize(("kind", "name"), [(16, "IQ2_XXS"), (34, "TQ1_0"), (99, "type 99")])
def test_formats_that_are_not_read_are_named(kind: int, name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_bytes(tensors=[tensor_row(kind=kind)]))
    with pytest.raises(ConfigError, match=f"is {name}, which is not read"):
        GgufFile(file)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        GgufFile(tmp_path / "nowhere.gguf")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_gives_a_sentence_or_a_file_that_reads(
    written: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(written[0].read_bytes())
    head = 800  # metadata and tensor table
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, head))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        opened = GgufFile(file)
    except InputError:
        return
    for name, info in opened.tensors.items():
        assert opened.read(name).shape == info.shape


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.scheme])
@torch.inference_mode()
def test_codes_stand_for_the_numbers_of_the_reference_whatever_thread_takes_them(name: str) -> None:
    """As an engine loads them: on two threads, in inference mode. Scales may be negative, and one is 0."""
    block = BLOCKS[name]
    blocks = random_blocks(name, 2**20 // block.n_values + 64)  # more than a piece
    for at in block.halves:
        blocks[3, at : at + 2] = 0
    raw = blocks.reshape(-1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        codes = codes_of(READ[name], raw, 32)
    finally:
        torch.set_num_threads(before)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(32, -1)
    assert torch.equal(codes.values(), torch.from_numpy(wanted))
    assert codes.scale.shape[:2].numel() == SCHEMES[str(block.scheme)].scales(*codes.codes.shape)
