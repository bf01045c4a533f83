"""llama2.c checkpoints: the real stories260K from both of its files, files written here, and damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import read_spec
from twostroke.core.spec import ModelSpec, RopeSpec
from twostroke.data.tokenizer import load_tokenizer
from twostroke.interop.import_model import import_model
from twostroke.interop.llama2c import read_llama2c, read_tokenizer_bin
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model


@torch.no_grad()
def greedy(model: Decoder, ids: list[int], n_ids: int) -> list[int]:
    """The plainest continuation: the whole sequence again for every token."""
    while len(ids) < n_ids:
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    return ids


@pytest.fixture(scope="module", params=["stories260K.bin", "stories260K.gguf"])
def imported(request: pytest.FixtureRequest, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("imported") / "stories260K"
    report = import_model(assets / "weights" / "stories260K" / request.param, directory)
    assert report.dtype == "fp32"
    assert report.tokenizer is not None
    return directory


def test_stories260k_reproduces_its_200_tokens_exactly(imported: Path, assets: Path) -> None:
    expected = json.loads((assets / "weights/stories260K/expected_greedy_200_ids.json").read_text())
    ids: list[int] = expected["greedy_token_ids"]
    assert len(ids) == expected["steps"] + 1
    assert greedy(load_model(imported), [expected["bos"]], len(ids)) == ids
    assert load_tokenizer(imported).decode(ids) == (assets / "weights/stories260K/expected_greedy_200.txt").read_text()


def test_stories260k_opens_in_transformers_with_its_tokenizer(imported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(imported)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    assert prompt.input_ids[0, 0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token == "</s>"
    theirs = AutoModelForCausalLM.from_pretrained(imported, dtype=torch.float32)
    with torch.no_grad():
        difference = theirs(prompt.input_ids).logits - load_model(imported)(prompt.input_ids)
    assert float(difference.abs().max()) < 1e-4  # logits of about 10, in fp32


def test_both_files_hold_the_same_model(assets: Path, tmp_path: Path) -> None:
    folder = assets / "weights" / "stories260K"
    models = []
    for name in ("stories260K.bin", "stories260K.gguf"):
        import_model(folder / name, tmp_path / name)
        models.append(load_model(tmp_path / name))
    tokens = torch.arange(40)[None] % 500
    with torch.no_grad():
        assert torch.equal(models[0](tokens), models[1](tokens))


# --- checkpoints written here ------------------------------------------------------------------------------------------------

SPEC = ModelSpec("llama", 20, 2, 16, 2, 1, 8, 24, 10, bos_token_id=1, eos_token_ids=(2,), tied_embeddings=True)


def pairs_from_halves(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The permutation of llama2.c's ``export.py`` for Hugging Face weights."""
    rows, columns = weight.shape
    return weight.view(n_heads, 2, rows // n_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def llama2c_bytes(decoder: Decoder) -> bytes:
    """``legacy_export`` of llama2.c."""
    spec, state = decoder.spec, decoder.state_dict()
    vocab = spec.vocab_size if spec.tied_embeddings else -spec.vocab_size
    header = (spec.d_model, spec.d_ff, spec.n_layers, spec.n_heads, spec.n_kv_heads, vocab, spec.max_positions)
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    kinds: dict[str, list[torch.Tensor]] = {key: [] for key in ("an", "q", "k", "v", "o", "mn", "gate", "down", "up")}
    for i in range(spec.n_layers):
        q, k, v = state[f"blocks.{i}.attn.qkv.weight"].split((q_rows, kv_rows, kv_rows))
        gate, up = state[f"blocks.{i}.mlp.gate_up.weight"].chunk(2)
        values = (
            state[f"blocks.{i}.attn_norm.weight"], pairs_from_halves(q, spec.n_heads), pairs_from_halves(k, spec.n_kv_heads), v,
            state[f"blocks.{i}.attn.out.weight"], state[f"blocks.{i}.mlp_norm.weight"], gate,
            state[f"blocks.{i}.mlp.down.weight"], up,
        )  # fmt: skip
        for key, value in zip(kinds, values, strict=True):
            kinds[key].append(value)
    frequencies = spec.rope.theta ** (-torch.arange(0, spec.head_dim, 2).double() / spec.head_dim)
    angles = torch.arange(spec.max_positions)[:, None] * frequencies
    parts = [state["embed.weight"], *(t for group in kinds.values() for t in group), state["final_norm.weight"]]
    parts += [angles.cos(), angles.sin()]
    if not spec.tied_embeddings:
        parts.append(state["head.weight"])
    return struct.pack("<7i", *header) + b"".join(part.float().numpy().astype("<f4").tobytes() for part in parts)


@pytest.mark.parametrize(
    "spec",
    [SPEC, SPEC.with_(tied_embeddings=False), SPEC.with_(rope=RopeSpec(theta=1e6), n_kv_heads=2), SPEC.with_(max_positions=1)],
    ids=["tied", "untied", "theta", "one-position"],
)
@torch.no_grad()
def test_a_written_checkpoint_imports_as_the_same_model(spec: ModelSpec, tmp_path: Path) -> None:
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    (tmp_path / "m.bin").write_bytes(llama2c_bytes(decoder))
    report = import_model(tmp_path / "m.bin", tmp_path / "m")
    assert read_spec(tmp_path / "m") == spec
    for name, parameter in load_model(tmp_path / "m").state_dict().items():
        assert torch.equal(parameter, decoder.state_dict()[name]), name
    assert report.tokenizer is None
    assert any("no tokenizer" in note for note in report.notes)


def changed(content: bytes, field: int, value: int) -> bytes:
    return content[: 4 * field] + struct.pack("<i", value) + content[4 * field + 4 :]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: b"", "is 0 bytes"),
        (lambda c: c[:20], "is 20 bytes"),
        (lambda c: c[:-1], "describes"),
        (lambda c: c + b"\0", "describes"),
        (lambda c: changed(c, 0, 17), "its header reads"),
        (lambda c: changed(c, 1, 2**31 - 1), "describes"),
        (lambda c: changed(c, 2, 2**31 - 1), "n_layers=2147483647 must be at most"),
        (lambda c: changed(c, 3, 0), "its header reads"),
        (lambda c: changed(c, 4, 2**20), "n_kv_heads=1048576 must divide"),
        (lambda c: changed(c, 5, 0), "its header reads"),
        (lambda c: changed(c, 6, -4), "its header reads"),
        (lambda c: c[: -4 * 80] + np.full(80, np.nan, "<f4").tobytes(), "does not hold angles"),
    ],
)
def test_a_damaged_checkpoint_is_a_sentence(change, sentence: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "m.bin"
    file.write_bytes(change(llama2c_bytes(Decoder(SPEC))))
    with pytest.raises(CorruptFileError, match=r"m\.bin") as caught:
        read_llama2c(file, None)
    assert sentence in str(caught.value)


def test_later_versions_and_scaled_rotary_tables_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.bin"
    file.write_bytes(struct.pack("<Ii", 0x616B3432, 2) + bytes(300))
    with pytest.raises(ConfigError, match="version 2; only version 0"):
        read_llama2c(file, None)
    content = bytearray(llama2c_bytes(Decoder(SPEC)))
    table = 4 * SPEC.max_positions * 4
    content[-table:] = np.sin(np.arange(10)[:, None] * np.array([1.0, 0.5, 0.1, 0.09])).astype("<f4").tobytes()
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="scaled tables are not read"):
        read_llama2c(file, None)


# --- tokenizer.bin -----------------------------------------------------------------------------------------------------------


def tokenizer_bytes(pieces: list[bytes], scores: list[float] | None = None) -> bytes:
    scores = scores or [-float(i) for i in range(len(pieces))]
    longest = struct.pack("<i", max(map(len, pieces)))
    return longest + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in zip(pieces, scores, strict=True))


PIECES = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{i:02X}>".encode() for i in range(256)), b" a", b"a", b" ", b"b", b"ab"]


def test_a_tokenizer_bin_becomes_a_tokenizer_that_keeps_every_text(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.bin"
    file.write_bytes(tokenizer_bytes(PIECES))
    tokenizer = read_tokenizer_bin(file, len(PIECES)).tokenizer
    assert tokenizer.encode("a abé").tokens == ["<s>", "▁a", "▁a", "b", "<0xC3>", "<0xA9>"]
    for text in ("a", " a", "a  b", "é\n\t<0x41>", "日本 🙂", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("content", "n", "sentence"),
    [
        (tokenizer_bytes(PIECES), len(PIECES) + 1, "ends at token 264 of the model's 265"),
        (tokenizer_bytes(PIECES), len(PIECES) - 1, "more bytes after"),
        (tokenizer_bytes(PIECES)[:-1], len(PIECES), "claims 2 bytes"),
        (tokenizer_bytes([*PIECES, b"a"]), len(PIECES) + 1, "'a' occurs twice"),
        (tokenizer_bytes([*PIECES, b"\xff"]), len(PIECES) + 1, "is not UTF-8"),
        (struct.pack("<ifi", 9, 0.0, 2**31 - 1), 1, "claims 2147483647 bytes"),
        (struct.pack("<ifi", 9, 0.0, -1), 1, "claims -1 bytes"),
        (struct.pack("<ifi", 9, float("nan"), 0), 1, "score nan"),
        (b"", 1, "ends at token 0"),
    ],
)
def test_a_tokenizer_of_another_model_or_damaged_is_a_sentence(content: bytes, n: int, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.bin"
    file.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        read_tokenizer_bin(file, n)
    assert sentence in str(caught.value)


def test_a_missing_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_tokenizer_bin(tmp_path / "tokenizer.bin", 5)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_damage_to_a_tokenizer_is_a_sentence_or_a_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(tokenizer_bytes(PIECES))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged-tokenizer.bin"
    file.write_bytes(content)
    try:
        tokenizer = read_tokenizer_bin(file, len(PIECES)).tokenizer
    except InputError:
        return
    assert tokenizer.get_vocab_size() == len(PIECES)
