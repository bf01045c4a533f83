from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twostroke.core.errors import ConfigError, CorruptFileError, DataError
from twostroke.data.sources import find_documents
from twostroke.data.tokenizer import END_OF_TEXT, eos_id_of, load_tokenizer, train_tokenizer

TEXT = "def hello(name):\n    return f'hello {name}'\n\n# The cat sat on the mat, and the dog sat on the log.\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(iter([TEXT] * 20), 320, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_round_trips(trained: Tokenizer, text: str) -> None:
    trained.encode_special_tokens = True
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=False) == text
    assert 0 not in ids, "the end of a document cannot be written inside one"


def test_a_trained_tokenizer_has_its_end_at_zero_and_all_bytes(trained: Tokenizer) -> None:
    assert eos_id_of(trained) == trained.token_to_id(END_OF_TEXT) == 0
    assert trained.get_vocab_size() == len(trained.get_vocab()) > 290
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(trained.get_vocab())


def test_end_of_text_inside_a_document_is_plain_text(trained: Tokenizer) -> None:
    trained.encode_special_tokens = True
    text = f"a{END_OF_TEXT}b"
    assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text
    assert 0 not in trained.encode(text).ids


def test_training_is_deterministic(tmp_path: Path) -> None:
    words = [" ".join(random.Random(i).choices(TEXT.split(), k=50)) for i in range(50)]
    train_tokenizer(iter(words), 400, tmp_path / "a.json")
    train_tokenizer(iter(words), 400, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_small_text_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    assert 257 <= train_tokenizer(iter(["ab ab"]), 5000, tmp_path / "a.json").get_vocab_size() < 300


def test_training_refuses_small_and_endless_vocabularies_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size=256 must be at least 257"):
        train_tokenizer(iter([TEXT]), 256, tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"vocab_size=1000000000000 must be at least 257, .*at most 4194304"):
        train_tokenizer(iter([TEXT]), 10**12, tmp_path / "a.json")  # the library ended the process: no room for so many
    with pytest.raises(DataError, match=r"no text to train a tokenizer on"):
        train_tokenizer(iter([]), 300, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_source_comes_through_training(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x"}\nbroken\n')
    with pytest.raises(DataError, match=r"line 2 is not valid JSON"):
        train_tokenizer((d.text for d in find_documents([str(file)])), 300, tmp_path / "t.json")


def test_loading_forgets_truncation_and_padding(trained: Tokenizer, tmp_path: Path) -> None:
    limited = Tokenizer.from_str(trained.to_str())
    limited.enable_truncation(4)
    limited.enable_padding(length=8)
    limited.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(TEXT).ids == trained.encode(TEXT).ids
    assert loaded.encode("a").ids == trained.encode("a").ids


def test_tokenizers_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer .*nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"tokenizer.json does not exist"):
        load_tokenizer(tmp_path)
    for content in ("", "{}", "[1]", "\x00" * 10, '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CorruptFileError, match=r"tokenizer.json is not a tokenizer.json that"):
            load_tokenizer(tmp_path)


def test_mutated_tokenizers_never_crash(trained: Tokenizer, tmp_path: Path) -> None:
    content = bytearray(trained.to_str().encode())
    rng = random.Random(0)
    file = tmp_path / "tokenizer.json"
    n_refused = 0
    for _ in range(150):
        mutated = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        file.write_bytes(mutated[: rng.choice([len(mutated), rng.randrange(len(mutated))])])
        try:
            load_tokenizer(file).encode(TEXT)
        except CorruptFileError:
            n_refused += 1
    assert n_refused > 50


def test_the_end_token_is_the_configured_one_first(trained: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(trained.to_str())
    for named, expected in (
        ("!", trained.token_to_id("!")),
        ({"content": "?"}, trained.token_to_id("?")),
        (None, 0),
        ("absent", 0),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert eos_id_of(trained, file) == eos_id_of(trained, tmp_path) == expected
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CorruptFileError, match=r"tokenizer_config.json"):
        eos_id_of(trained, tmp_path)


def test_a_vocabulary_without_an_end_is_refused() -> None:
    with pytest.raises(DataError, match=r"no end-of-text token"):
        eos_id_of(Tokenizer(models.BPE({"a": 0}, [])))


def test_the_byte_level_pattern_gives_gpt2s_ids(assets: Path) -> None:
    """GPT-2's own vocabulary in a tokenizer built as ours are, on llama.cpp's test vectors for it."""
    folder = assets / "tokenizers" / "gpt2"
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = (folder / "ggml-vocab-gpt-2.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in (folder / "ggml-vocab-gpt-2.gguf.out").read_text().split("\n")]
    assert len(texts) >= 40
    for text, expected in zip(texts, ids, strict=False):
        assert tokenizer.encode(text).ids == expected, repr(text)
        assert tokenizer.decode(expected) == text


def test_japanese_round_trips_by_bytes(assets: Path, trained: Tokenizer) -> None:
    trained.encode_special_tokens = True
    for document in find_documents([str(assets / "corpora" / "text" / "wagahaiwa_nekodearu_ja.txt")]):
        ids = trained.encode(document.text).ids
        assert trained.decode(ids, skip_special_tokens=False) == document.text


def bare(path: Path, **changes: object) -> Path:
    """A ``tokenizer.json`` of three tokens, with parts replaced."""
    model = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    changed = {name: value for name, value in changes.items() if name in model}
    others = {name: value for name, value in changes.items() if name not in model}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model | changed} | others))
    return path


def test_a_post_processor_that_names_a_missing_token_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}
    template |= {"special_tokens": {}}
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json .*tokenise"):
        load_tokenizer(bare(tmp_path, post_processor=template))
    assert load_tokenizer(bare(tmp_path)).encode("ab").ids == [2]


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    huge = {"a": 0, "b": 1, "ab": 2**31}
    with pytest.raises(CorruptFileError, match=r"token 'ab' the id 2147483648; the largest vocabulary has 4194304\."):
        load_tokenizer(bare(tmp_path, vocab=huge))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2}))
    with pytest.raises(CorruptFileError, match=r"token 'ab' the id 2; the model's vocabulary has 2\. Give the tokenizer"):
        load_tokenizer(bare(tmp_path))
    padding = {"id": 3, "content": "<pad>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    assert load_tokenizer(bare(tmp_path, added_tokens=[padding])).token_to_id("<pad>") == 3, "no text becomes it by itself"


@pytest.mark.parametrize(
    "part",
    [
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 150_000}},
        {"merges": [["a", "b"]] * 2_100_000},
        {"other": [[]] * 2_100_000},
        {"vocab": {"a": 0, "b": 1, "ab": 2**31}},
    ],
    ids=["decoders", "merges", "lists", "huge id"],
)
def test_a_hostile_file_is_refused_before_it_fills_the_memory(tmp_path: Path, part: dict[str, object]) -> None:
    file = bare(tmp_path, **part) / "tokenizer.json"
    code = (
        "import resource, sys\n"
        "from twostroke.core.errors import CorruptFileError\n"
        "from twostroke.data.tokenizer import load_tokenizer\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    load_tokenizer(sys.argv[1])\nexcept CorruptFileError:\n"
        "    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))"
    )
    grown = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True).stdout
    assert int(grown) <= 2 * file.stat().st_size + 64 * 2**20


def replace(content: str, **pattern: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"normalizer": replace("a" * 100_000)}, r"100000 times as long by its normalizers"),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace("a" * 10)] * 6}}, r"1000000 times as long"),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace("a", Regex="")] * 20}}, r"1048576 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 10**6}}, r"times as long"),
        ({"decoder": replace("x" * 1000)}, r"1000 times as long by its decoders"),
        ({"vocab": {"a": 0, "b": 1, "ab": 2, "c" * 5000: 3}}, r"a token of 5000 characters; at most 4096 are read"),
    ],
)
def test_a_tokenizer_that_makes_much_of_little_is_refused(tmp_path: Path, part: dict[str, object], sentence: str) -> None:
    with pytest.raises(CorruptFileError, match=sentence):
        load_tokenizer(bare(tmp_path, **part))


def test_replacements_of_sentencepiece_tokenizers_are_read(tmp_path: Path) -> None:
    steps = [{"type": "Prepend", "prepend": "▁"}, replace("▁", String=" "), replace("▁", Regex=" {2,}")]
    load_tokenizer(bare(tmp_path, normalizer={"type": "Sequence", "normalizers": steps}, decoder=replace(" ", String="▁")))
