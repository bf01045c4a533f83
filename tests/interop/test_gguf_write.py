"""GGUF files that are written: every architecture comes back as it was, tokenizers too, and what has no place is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from typer.testing import CliRunner

from gguf_files import reference_model
from hf_models import save_reference
from interop.test_gguf_families import CASES, SIZES
from interop.test_gguf_tokenizer import SAMPLES, tables
from twostroke.cli.main import app
from twostroke.core.documents import Allowance
from twostroke.core.errors import ConfigError, InputError, UnsupportedFamilyError
from twostroke.core.spec import Departures, ModelSpec, RopeSpec
from twostroke.interop.export_model import export_model
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_export import write_gguf
from twostroke.interop.gguf_mixes import PRECISIONS
from twostroke.interop.gguf_model import read_gguf
from twostroke.interop.gguf_vocabulary import vocabulary
from twostroke.interop.import_model import import_model
from twostroke.interop.tokenizer_tables import WORDS, Words, byte_level_bpe, byte_level_words, sentencepiece_bpe
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model, load_state
from twostroke.model.save import save_model
from twostroke.quantization.importance import mean_squares


def as_stored(spec: ModelSpec) -> ModelSpec:
    """``spec`` without what GGUF leaves out, numbers of its rotary scaling as near as fp32."""
    short, long = (tuple(round(f, 4) for f in factors) for factors in (spec.rope.short_factors, spec.rope.long_factors))
    rope = replace(spec.rope, magnitude=round(spec.rope.magnitude, 4), short_factors=short, long_factors=long)
    return spec.with_(dropout=0.0, eos_token_ids=(), rope=rope)


@pytest.mark.parametrize("case", [case for case in CASES if case != "exaone4"])  # 4 layers with windows are refused below
def test_every_architecture_comes_back(case: str, tmp_path: Path) -> None:
    _, model_type, _, changes, _ = CASES[case]
    reference_model(model_type, **(SIZES | changes)).save_pretrained(tmp_path / "m")
    export_model(tmp_path / "m", tmp_path / "m.gguf", precision="F32", to="gguf")
    spec, state = load_state(tmp_path / "m")
    source = read_gguf(tmp_path / "m.gguf")
    assert as_stored(source.spec) == as_stored(spec)
    assert source.spec.eos_token_ids == spec.eos_token_ids[:3]
    assert set(source.state) == set(state)
    for name, tensor in state.items():
        if spec.departures.norm_offset and name.endswith("norm.weight"):
            assert (source.state[name] - tensor).abs().max() <= 2**-22  # 1 is added and taken off, in fp32
        else:
            assert torch.equal(source.state[name], tensor), name


def small(directory: Path, **changes: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"d_model": 256, "d_ff": 512, "n_layers": 8, "vocab_size": 300, "eos_token_ids": (0,)}
    given: dict[str, Any] = {"family": "llama", "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "max_positions": 64}
    spec = ModelSpec(**(given | sizes | changes))
    torch.manual_seed(0)
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_model(decoder, spec, directory)
    return spec


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_comes_back_within_its_error(precision: str, tmp_path: Path) -> None:
    spec = small(tmp_path / "m", n_layers=2)
    report = export_model(tmp_path / "m", tmp_path / "m.gguf", precision=precision, to="gguf")
    assert report.notes == ("the model has no tokenizer, so the file has none.",)
    assert report.n_bytes == (tmp_path / "m.gguf").stat().st_size
    error = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8": 0.006, "Q6": 0.02, "Q5": 0.045, "Q4": 0.09}
    _, state = load_state(tmp_path / "m")
    source = read_gguf(tmp_path / "m.gguf", "fp32")
    assert source.spec == spec
    for name, tensor in state.items():
        bound = next(value for start, value in error.items() if precision.startswith(start)) if tensor.dim() > 1 else 0.0
        assert float((source.state[name] - tensor).norm()) <= bound * float(tensor.norm()), name


def test_what_llama_cpp_computes_otherwise_is_noted(tmp_path: Path) -> None:
    """Quantised by importance too: keys' matrices, whose rows are no inputs, are not weighed."""
    changes = SIZES | CASES["deepseek_v2-groups"][3] | {"q_lora_rank": None, "num_hidden_layers": 2}
    reference_model("deepseek_v2", **changes).save_pretrained(tmp_path / "m")
    spec, state = load_state(tmp_path / "m")
    weighed = {name: torch.ones(tensor.shape[-1]) for name, tensor in state.items() if tensor.dim() > 1}
    notes = write_gguf(ExportSource(tmp_path / "m", spec, state, None, weighed), tmp_path / "m.gguf", "Q4_K_M")
    assert any("without compressed queries" in note for note in notes)
    assert any("two best scores" in note for note in notes)
    reference_model("olmoe", **(SIZES | CASES["olmoe"][3] | {"num_key_value_heads": 2})).save_pretrained(tmp_path / "o")
    notes = export_model(tmp_path / "o", tmp_path / "o.gguf", precision="F16", to="gguf").notes
    assert any("key heads are fewer than query heads" in note for note in notes)
    kept = read_gguf(tmp_path / "m.gguf", "fp32").state["blocks.0.attn.kv_b.weight"]
    assert float((kept - state["blocks.0.attn.kv_b.weight"]).norm() / state["blocks.0.attn.kv_b.weight"].norm()) < 0.1


def test_threads_do_not_change_a_file(tmp_path: Path) -> None:
    small(tmp_path / "m", n_layers=1)
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        (tmp_path / str(n_threads)).mkdir()
        export_model(tmp_path / "m", tmp_path / str(n_threads) / "m.gguf", precision="Q4_K_M", to="gguf")
    torch.set_num_threads(1)
    assert (tmp_path / "1/m.gguf").read_bytes() == (tmp_path / "2/m.gguf").read_bytes()


def test_types_of_a_mix_and_what_stands_for_rows_that_k_types_do_not_fit(tmp_path: Path) -> None:
    small(tmp_path / "m")
    export_model(tmp_path / "m", tmp_path / "m.gguf", precision="Q4_K_M", to="gguf")
    file = GgufFile(tmp_path / "m.gguf")
    kinds = {name: info.kind.name for name, info in file.tensors.items()}
    more = [i for i in range(8) if kinds[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert more == [0, 3, 6, 7]  # the first eighth, the last, and every third between
    assert more == [i for i in range(8) if kinds[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert (kinds["output.weight"], kinds["token_embd.weight"], kinds["output_norm.weight"]) == ("Q6_K", "Q4_K", "F32")
    assert file.metadata["general.file_type"] == 15
    assert file.metadata["general.quantization_version"] == 2
    small(tmp_path / "odd", d_model=96, n_heads=3, n_kv_heads=3, head_dim=32, d_ff=80, n_layers=1)
    notes = export_model(tmp_path / "odd", tmp_path / "odd.gguf", precision="Q4_K_M", to="gguf").notes
    assert notes[0].startswith("9 matrices have rows that are no whole blocks of their type in Q4_K_M")
    kinds = {name: info.kind.name for name, info in GgufFile(tmp_path / "odd.gguf").tensors.items()}
    assert (kinds["blk.0.attn_q.weight"], kinds["output.weight"], kinds["blk.0.ffn_down.weight"]) == ("Q5_0", "Q8_0", "F16")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_importance_is_the_mean_square_of_each_matrix_inputs(family: str, tmp_path: Path) -> None:
    changes = CASES[family][3] | {"tie_word_embeddings": True}
    reference_model(family, **(SIZES | changes)).save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m")
    batches = [torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    found = mean_squares(model, batches)
    _, state = load_state(tmp_path / "m")
    assert set(found) == {n for n, t in state.items() if t.dim() > 1}
    ids = torch.cat(batches)
    read = model.blocks[0].attn_norm(model.embedded(ids)).flatten(0, 1)
    torch.testing.assert_close(found["blocks.0.attn.qkv.weight"], read.square().mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["embed.weight"], model.hidden(ids).flatten(0, 1).square().mean(0), rtol=1e-4, atol=1e-6)


# -- tokenizers -----------------------------------------------------------------------------------------------------------


def put(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("words", dict.fromkeys(WORDS.values()), ids=lambda words: words.names[0])
def test_byte_level_tokenizers_come_back_by_the_rule_that_cuts_their_words(words: Words, tmp_path: Path) -> None:
    vocab, merges = tables(byte_level_words(words))
    pieces = sorted(vocab, key=vocab.__getitem__)
    kinds = [3, 4] + [1] * (len(pieces) - 2)
    bos = 0 if words.begins else None
    ours = byte_level_bpe(pieces, [" ".join(m) for m in merges], kinds, words, bos, Allowance(tmp_path, 2**24))
    directory = put(tmp_path / "m", ours, chat_template="{{ messages }}", pad_token={"content": "<|end|>"})
    spec = small(directory / "x", n_layers=1, vocab_size=len(pieces) + 3, bos_token_id=0, eos_token_ids=(1,))
    found = vocabulary(directory, spec)
    assert WORDS[found.metadata["tokenizer.ggml.pre"]] == words
    assert found.metadata["tokenizer.ggml.padding_token_id"] == 1
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).rename(directory / "x" / file)
    export_model(directory / "x", tmp_path / "m.gguf", precision="BF16", to="gguf")
    import_model(tmp_path / "m.gguf", tmp_path / "back")
    again = Tokenizer.from_file(str(tmp_path / "back/tokenizer.json"))
    for text in SAMPLES:
        assert again.encode(text).ids == ours.encode(text).ids, repr(text)
    assert json.loads((tmp_path / "back/tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers_come_back(prefix: bool, tmp_path: Path) -> None:
    words = [
        "▁",
        *"abcdehlorstuwy",
        "he",
        "ll",
        "▁w",
        "▁the",
        "the",
        "▁t",
        "hell",
        "hello",
        "▁hello",
        "or",
        "wor",
        "▁wor",
        "▁world",
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys((*words, "ld", "th"))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    scores = [0.0] * 259 + [-float(i // 2) for i in range(len(pieces) - 259)]  # each score twice
    ours = sentencepiece_bpe(pieces, scores, kinds, 1, Allowance(tmp_path, 2**24), prefix)
    spec = small(tmp_path / "m", n_layers=1, vocab_size=len(pieces), bos_token_id=1, eos_token_ids=(2,))
    put(tmp_path / "m", ours, unk_token="<unk>")
    export_model(tmp_path / "m", tmp_path / "m.gguf", precision="BF16", to="gguf")
    import_model(tmp_path / "m.gguf", tmp_path / "back")
    again = Tokenizer.from_file(str(tmp_path / "back/tokenizer.json"))
    for text in (*SAMPLES, "hello world", "the hellold the  world", " he"):
        assert again.encode(text).ids == ours.encode(text).ids, repr(text)
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.unknown_token_id"] == 0
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert spec.eos_token_ids == (metadata["tokenizer.ggml.eos_token_id"],)


def byte_level(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (byte_level(normalizer=normalizers.Lowercase()), "the normalizer Lowercase has no name in GGUF"),
        (byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "add_prefix_space"),
        (byte_level(pre_tokenizer=pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\w+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])), "cutting a text into words by '\\\\w+'"),
        (byte_level(pre_tokenizer=pre_tokenizers.Whitespace()), "BPE that is neither byte-level nor falls back to bytes"),
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "is WordLevel, and only BPE is written"),
    ],
)  # fmt: skip
def test_a_tokenizer_without_a_name_in_gguf_is_refused_and_nothing_is_left(
    tokenizer: Tokenizer, said: str, tmp_path: Path
) -> None:
    small(tmp_path / "m", n_layers=1)
    put(tmp_path / "m", tokenizer)
    with pytest.raises(ConfigError) as caught:
        export_model(tmp_path / "m", tmp_path / "m.gguf", to="gguf")
    assert said in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


# -- what has no place ----------------------------------------------------------------------------------------------------

LLAMA3 = RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 4096)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation": "gelu_tanh"}, "activation='gelu_tanh' of a llama model cannot be written as GGUF's 'llama'"),
        ({"rope": LLAMA3}, "a scaling that is not Llama 3's"),
        ({"rope": RopeSpec(1e4, "dynamic", 2.0)}, "rope.scaling='dynamic'"),
        (
            {"family": "qwen2", "qkv_bias": True, "sliding_window": 9, "sliding_window_layers": (1,)},
            "sliding_window=9 of layer 1",
        ),
        (
            {
                "family": "exaone4",
                "qk_norm": True,
                "sliding_window": 9,
                "sliding_window_layers": (0,),
                "departures": Departures(norms_after=True, unrotated_layers=(1,)),
            },
            "llama.cpp has windows for 64 layers",
        ),
        ({"family": "smollm3", "departures": Departures(unrotated_layers=(0,))}, "departures.unrotated_layers=(0,)"),
    ],
)
def test_a_model_that_the_format_would_change_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    small(tmp_path / "m", n_layers=2, **changes)
    with pytest.raises(ConfigError) as caught:
        export_model(tmp_path / "m", tmp_path / "m.gguf", to="gguf")
    assert said in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_llama_3s_scaling_and_windows_come_back(tmp_path: Path) -> None:
    spec = small(tmp_path / "m", n_layers=1, rope=RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192))
    export_model(tmp_path / "m", tmp_path / "m.gguf", to="gguf")
    assert read_gguf(tmp_path / "m.gguf").spec == spec
    mistral = small(tmp_path / "w", n_layers=1, family="mistral", sliding_window=7)
    notes = export_model(tmp_path / "w", tmp_path / "w.gguf", to="gguf").notes
    assert read_gguf(tmp_path / "w.gguf").spec == mistral
    assert "llama.cpp computes this architecture without the model's window" in notes[0]


def test_kimi_k2_comes_back_by_its_tokenizer(tmp_path: Path) -> None:
    """Its architecture is DeepSeek-V3's; without its tokenizer it is read as that."""
    save_reference("kimi_k2", tmp_path / "kimi")
    words = WORDS["kimi-k2"]
    vocab, merges = tables(byte_level_words(words))
    pieces = sorted(vocab, key=vocab.__getitem__)
    spec = load_state(tmp_path / "kimi")[0].with_(vocab_size=len(pieces), bos_token_id=0, eos_token_ids=(1,))
    torch.manual_seed(0)
    save_model(Decoder(spec), spec, tmp_path / "m")
    export_model(tmp_path / "m", tmp_path / "plain.gguf", precision="F32", to="gguf")
    assert read_gguf(tmp_path / "plain.gguf").spec == spec.with_(family="deepseek_v3")
    given = byte_level_bpe(
        pieces, [" ".join(m) for m in merges], [3, 3] + [1] * (len(pieces) - 2), words, None, Allowance(tmp_path, 2**24)
    )
    put(tmp_path / "m", given, eos_token="<|end|>")
    export_model(tmp_path / "m", tmp_path / "m.gguf", precision="F32", to="gguf")
    found = read_gguf(tmp_path / "m.gguf")
    assert found.spec == spec
    for name, tensor in load_state(tmp_path / "m")[1].items():
        assert torch.equal(found.state[name], tensor), name


def test_a_family_without_a_row_and_a_weight_beyond_fp16_are_refused(tmp_path: Path) -> None:
    spec = small(tmp_path / "m", n_layers=1)
    _, state = load_state(tmp_path / "m")
    save_model({n: t * 1e6 if n == "head.weight" else t for n, t in state.items()}, spec, tmp_path / "large")
    with pytest.raises(InputError, match="beyond the largest number that F16 holds"):
        export_model(tmp_path / "large", tmp_path / "m.gguf", precision="F16", to="gguf")
    small(tmp_path / "neo", n_layers=1, family="gpt_neo", positions="learned", norm="layernorm", mlp="gelu", n_kv_heads=4,
          activation="gelu_tanh", attn_out_bias=True, mlp_bias=True, tied_embeddings=True,
          departures=Departures(attention_scale=1.0))  # fmt: skip
    with pytest.raises(UnsupportedFamilyError, match="family='gpt_neo' is not written as GGUF"):
        export_model(tmp_path / "neo", tmp_path / "m.gguf", to="gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_the_command_writes_a_file_guided_by_a_text(tmp_path: Path) -> None:
    words = WORDS["gpt-2"]
    vocab, merges = tables(byte_level_words(words))
    pieces = sorted(vocab, key=vocab.__getitem__)
    tokenizer = byte_level_bpe(
        pieces, [" ".join(m) for m in merges], [3, 3] + [1] * (len(pieces) - 2), words, None, Allowance(tmp_path, 2**24)
    )
    small(tmp_path / "m", n_layers=1, vocab_size=len(pieces))
    put(tmp_path / "m", tokenizer, eos_token="<s>")
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40, encoding="utf-8")

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["export", str(tmp_path / "m"), *map(str, words), "--to", "gguf"])

    plain = run(tmp_path / "plain.gguf", "--precision", "Q4_K_M")
    assert plain.exit_code == 0, plain.output
    guided = run(tmp_path / "guided.gguf", "--precision", "Q4_K_M", "--calibration", tmp_path / "text.txt")
    assert guided.exit_code == 0, guided.output
    sizes = {name: (tmp_path / f"{name}.gguf").stat().st_size for name in ("plain", "guided")}
    assert abs(sizes["plain"] - sizes["guided"]) <= 64  # their names
    assert (tmp_path / "plain.gguf").read_bytes()[-50_000:] != (tmp_path / "guided.gguf").read_bytes()[-50_000:]
    refused = run(tmp_path / "x.gguf", "--precision", "F16", "--calibration", tmp_path / "text.txt")
    assert isinstance(refused.exception, ConfigError)
    assert "--calibration guides the search for scales" in str(refused.exception)
    assert isinstance(run(tmp_path / "x.bin").exception, InputError)
