"""Importing: every kind of source becomes a directory that opens here and in transformers; wrong ones get a sentence."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gguf_files import reference_model
from twostroke.core.errors import ConfigError, CorruptFileError, InputError, TwostrokeError
from twostroke.core.spec import ModelSpec
from twostroke.interop.import_model import import_model
from twostroke.model.decoder import Decoder
from twostroke.model.lazy_state import LazyState
from twostroke.model.load import load_model
from twostroke.model.save import save_model

SPEC = ModelSpec("llama", 96, 2, 32, 4, 2, 8, 48, 64, eos_token_ids=(0,))


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (1, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    pieces = {piece: i for i, piece in enumerate(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:95]])}
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@torch.no_grad()
def test_a_hugging_face_directory_keeps_logits_tokenizer_and_generation_settings(tmp_path: Path, tokenizer_file: Path) -> None:
    source = tmp_path / "source"
    model = reference_model("qwen3")
    model.save_pretrained(source)
    (source / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.6}')
    report = import_model(str(source), tmp_path / "m")
    assert (report.kind, report.family, report.dtype, report.tokenizer) == ("Hugging Face", "qwen3", "fp32", str(source))
    assert report.n_parameters == sum(p.numel() for p in model.parameters())
    assert report.n_bytes == sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    ours = load_model(tmp_path / "m")
    assert ours.spec.eos_token_ids == (2, 5)
    theirs = model(tokens()).logits
    assert float((ours(tokens()) - theirs).abs().max() / theirs.abs().max()) <= 1e-4  # as in the decoder's tests
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "m" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(("stored", "kept"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")])
def test_auto_keeps_the_format_of_the_source(stored: str, kept: str, tmp_path: Path) -> None:
    save_model(Decoder(SPEC), SPEC, tmp_path / "source", dtype=stored)
    assert import_model(tmp_path / "source", tmp_path / "m").dtype == kept
    assert load_file(tmp_path / "m" / "model.safetensors").keys() == load_file(tmp_path / "source" / "model.safetensors").keys()
    for name, tensor in load_file(tmp_path / "source" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "m" / "model.safetensors")[name])


def test_mixed_formats_become_fp32_and_rounding_is_reported(tmp_path: Path) -> None:
    save_model(Decoder(SPEC), SPEC, tmp_path / "source", dtype="bf16")
    file = tmp_path / "source" / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.full((32,), 1.001)}, file, metadata={"format": "pt"})
    assert import_model(tmp_path / "source", tmp_path / "m").dtype == "fp32"
    assert torch.equal(load_model(tmp_path / "m").final_norm.weight, torch.full((32,), 1.001))
    report = import_model(tmp_path / "source", tmp_path / "n", dtype="bf16")
    assert any("rounded from fp32 to bf16" in note for note in report.notes)


def test_a_given_tokenizer_replaces_the_sources(tmp_path: Path, tokenizer_file: Path) -> None:
    save_model(Decoder(SPEC), SPEC, tmp_path / "source")
    without = import_model(tmp_path / "source", tmp_path / "m")
    assert without.tokenizer is None
    assert any("no tokenizer" in note for note in without.notes)
    report = import_model(tmp_path / "source", tmp_path / "n", tokenizer=tokenizer_file)
    assert report.tokenizer == str(tokenizer_file)
    assert (tmp_path / "n" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "n" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    with pytest.raises(InputError, match=r"nowhere\.json does not exist"):
        import_model(tmp_path / "source", tmp_path / "o", tokenizer=tmp_path / "nowhere.json")


def test_each_tensor_is_read_once_and_progress_reaches_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(SPEC)
    reads: Counter[str] = Counter()

    def reader(name: str) -> Any:
        def read() -> torch.Tensor:
            reads[name] += 1
            return decoder.state_dict()[name]

        return read

    save_model(LazyState({name: reader(name) for name in decoder.state_dict()}), SPEC, tmp_path / "source")
    assert set(reads.values()) == {1}
    assert set(reads) == set(decoder.state_dict())
    shares: list[float] = []
    import_model(tmp_path / "source", tmp_path / "m", progress=lambda share, name: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == len(decoder.state_dict())


@pytest.mark.parametrize(
    ("name", "content", "error", "sentence"),
    [
        ("m.bin", b"PK\x03\x04" + bytes(100), InputError, "is a pickle"),
        ("m.pt", b"\x80\x02" + bytes(100), InputError, "is a pickle"),
        ("m.safetensors", bytes(100), InputError, "Give the directory"),
        ("m.xyz", b"hello", CorruptFileError, "neither GGUF"),
        ("m.gguf", b"", CorruptFileError, "neither GGUF"),
        ("m.bin", b"", CorruptFileError, "is 0 bytes"),
    ],
)
def test_files_that_are_no_model_get_a_sentence(
    name: str, content: bytes, error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error) as caught:
        import_model(tmp_path / name, tmp_path / "m")
    assert sentence in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_wrong_paths_formats_and_targets_get_a_sentence(tmp_path: Path) -> None:
    save_model(Decoder(SPEC), SPEC, tmp_path / "source")
    with pytest.raises(InputError, match="does not exist, and is not a Hub name"):
        import_model(str(tmp_path / "nowhere"), tmp_path / "m")
    with pytest.raises(InputError, match="does not exist, and is not a Hub name"):
        import_model("models/tiny.gguf", tmp_path / "m")
    with pytest.raises(ConfigError, match="dtype='int4' is not a format"):
        import_model(tmp_path / "source", tmp_path / "m", dtype="int4")
    with pytest.raises(InputError, match="is not empty"):
        import_model(tmp_path / "source", tmp_path / "source")
    import_model(tmp_path / "source", tmp_path / "m")
    import_model(tmp_path / "source", tmp_path / "m", replace=True)


# --- the Hub, without a network ----------------------------------------------------------------------------------------------


def test_a_hub_model_is_imported_from_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(Decoder(SPEC), SPEC, tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    report = import_model("someone/tiny", tmp_path / "m")
    assert (asked["name"], asked["revision"]) == ("someone/tiny", None)
    assert not any(pattern.endswith((".bin", ".py", ".pt")) or pattern == "*" for pattern in asked["allow_patterns"])
    assert report.source == "someone/tiny"
    load_model(tmp_path / "m")


def test_the_hub_out_of_reach_is_one_sentence(tmp_path: Path) -> None:
    """conftest sets HF_HUB_OFFLINE, and the cache is empty."""
    with pytest.raises(TwostrokeError, match="Offline, give the path") as caught:
        import_model("someone/tiny", tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_refusals_of_the_hub_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "https://example.invalid"))
    for error, sentence in (
        (errors.GatedRepoError("gated", response=response), "only to those who accept its terms"),
        (errors.RepositoryNotFoundError("missing", response=response), "no model 'someone/tiny'"),
        (errors.HFValidationError("bad name"), "nor a Hub name: bad name"),
    ):

        def refuse(name: str, error: Exception = error, **options: Any) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        with pytest.raises(InputError, match=sentence):
            import_model("someone/tiny", tmp_path / "m")
