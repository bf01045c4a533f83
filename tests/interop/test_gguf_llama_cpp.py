"""llama.cpp opens what is written as GGUF: it reads the same tokens, computes the same logits and writes the same text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from assets_folder import ASSETS
from gguf_files import reference_model
from interop.llama_environment import ask_llama
from interop.test_gguf_families import CASES, SIZES
from twostroke.core.spec import ModelSpec
from twostroke.data.tokenizer import train_tokenizer
from twostroke.interop.export_model import export_model
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.gguf import GgufFile
from twostroke.interop.gguf_export import write_gguf
from twostroke.interop.gguf_vocabulary import MIXED_TEXTS
from twostroke.interop.import_model import import_model
from twostroke.interop.tokenizer_tables import WORDS, byte_level_words
from twostroke.model.load import load_model, load_state

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

WINDOWLESS = {"mistral", "phi3", "exaone4"}
"""Cases whose windows llama.cpp leaves out; it has those of EXAONE 4 for its 64 layers alone."""

OTHER_GROUPS, TWICE = {"deepseek_v2-groups"}, {"deepseek_v2-joined"}
"""Cases whose groups of experts llama.cpp rates otherwise, as a note says, and those that are written as another is."""

HALF_GELU = {"gemma", "starcoder2", "gptneox", "falcon", "gpt2", "starcoder"}
"""Families whose activation llama.cpp looks up in a table of fp16 numbers."""


@torch.no_grad()
def greedy(directory: Path, ids: list[int], n: int) -> tuple[np.ndarray, list[int]]:
    """Our logits of ``ids``, and ``n`` tokens that follow."""
    model, found = load_model(directory), list(ids)
    first = model(torch.tensor([ids]))[0].numpy()
    for _ in range(n):
        found.append(int(model(torch.tensor([found]))[0, -1].argmax()))
    return first, found[len(ids) :]


def relative(theirs: np.ndarray, ours: np.ndarray) -> float:
    return float(np.abs(theirs - ours).max() / np.abs(ours).max())


@pytest.mark.parametrize("case", [case for case in CASES if case not in WINDOWLESS | OTHER_GROUPS | TWICE])
def test_logits_and_greedy_tokens_are_ours(case: str, tmp_path: Path) -> None:
    _, model_type, _, changes, _ = CASES[case]
    changes = SIZES | changes | {"max_position_embeddings": 128}
    if case == "gpt-oss":
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}  # its YaRN is not llama.cpp's, as a note says
    if case == "deepseek_v2":
        changes["num_hidden_layers"] = 27  # by which llama.cpp knows queries that are not compressed
    reference_model(model_type, **changes).save_pretrained(tmp_path / "m")
    export_model(tmp_path / "m", tmp_path / "m.gguf", precision="F32", to="gguf")
    ids = torch.randint(3, 96, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    rough = any(case.startswith(name) for name in HALF_GELU)
    ours, text = greedy(tmp_path / "m", ids, 64)
    found = ask_llama(tmp_path / "m.gguf", ids=ids, n_greedy=64)
    assert relative(found["logits"], ours) <= (5e-3 if rough else 2e-5)
    assert rough or found["greedy"] == text


BOUNDS = {"F32": 1e-5, "F16": 2e-3, "BF16": 1e-2, "Q8_0": 2e-2, "Q4_0": 3e-2}


@pytest.mark.parametrize(("precision", "bound"), BOUNDS.items())
def test_a_trained_model_goes_on_as_it_does_here(precision: str, bound: float, tmp_path: Path) -> None:
    """Other precisions are held to the numbers in the file: llama.cpp rounds what it multiplies with them to eight bits, to
    fp16 or to bf16."""
    import_model(ASSETS / "weights/stories260K/stories260K.gguf", tmp_path / "m")
    export_model(tmp_path / "m", tmp_path / "m.gguf", precision=precision, to="gguf")
    import_model(tmp_path / "m.gguf", tmp_path / "back", dtype="fp32")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    ids = tokenizer.encode("Once upon a time, there was a little girl named Lily.").ids
    ours, text = greedy(tmp_path / "back", ids, 64)
    found = ask_llama(tmp_path / "m.gguf", ids=ids, n_greedy=64, texts=MIXED_TEXTS)
    assert relative(found["logits"], ours) <= bound
    assert precision not in ("F32", "F16") or found["greedy"] == text
    assert found["ids"] == [tokenizer.encode(text).ids for text in MIXED_TEXTS]


def _trained(directory: Path) -> None:
    books = sorted((ASSETS / "corpora/books").glob("*.txt"))[:2]
    train_tokenizer((book.read_text(encoding="utf-8") for book in books), 2000, directory / "tokenizer.json")


def _gpt2(directory: Path) -> None:
    from transformers import GPT2TokenizerFast

    folder = ASSETS / "tokenizers/gpt2"
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    merges = [tuple(line.split()) for line in (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:] if line]
    GPT2TokenizerFast(vocab=vocabulary, merges=merges).backend_tokenizer.save(str(directory / "tokenizer.json"))


def _olmo(directory: Path) -> None:
    shutil.copy(ASSETS / "tokenizers/olmo/allenai_gpt-neox-olmo-dolma-v1_5.json", directory / "tokenizer.json")


def _kimi(directory: Path) -> None:
    """Trained by its words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level_words(WORDS["kimi-k2"]), decoders.ByteLevel()
    files = [
        str(ASSETS / "corpora/text/wagahaiwa_nekodearu_ja.txt"),
        *map(str, sorted((ASSETS / "corpora/books").glob("*.txt"))[:2]),
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["[EOS]"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train(list(map(str, files)), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("make", [_trained, _gpt2, _olmo, _kimi])
def test_tokens_are_ours(make: Any, tmp_path: Path) -> None:
    make(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    n = max(tokenizer.get_vocab().values()) + 1
    spec = ModelSpec("llama", n, 1, 64, 2, 2, 32, 64, 64, bos_token_id=None, eos_token_ids=(0,))
    state = random_state(spec)
    write_gguf(ExportSource(tmp_path, spec, state, tmp_path), tmp_path / "m.gguf", "F16")
    books = (ASSETS / "corpora/books").glob("*.txt")
    texts = [*MIXED_TEXTS, *(book.read_text(encoding="utf-8")[5000:7000] for book in books)]
    texts.append((ASSETS / "corpora/text/wagahaiwa_nekodearu_ja.txt").read_text(encoding="utf-8")[:500])
    assert ask_llama(tmp_path / "m.gguf", texts=texts)["ids"] == [tokenizer.encode(t).ids for t in texts]


def random_state(spec: ModelSpec) -> dict[str, torch.Tensor]:
    from twostroke.model.decoder import Decoder

    torch.manual_seed(0)
    decoder = Decoder(spec)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return {name: tensor.detach() for name, tensor in decoder.tensors.items()}


MIXES = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18}


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "falcon", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_every_matrix_has_the_type_that_llama_cpp_gives_it(family: str, tmp_path: Path) -> None:
    """Of 17 layers, tied and not, with packed projections and without."""
    changes = SIZES | next(c for _, kind, _, c, _ in CASES.values() if kind == family) | {"num_hidden_layers": 17}
    reference_model(family, **changes).save_pretrained(tmp_path / "m")
    spec, state = load_state(tmp_path / "m")
    source = ExportSource(tmp_path / "m", spec, state, None)
    write_gguf(source, tmp_path / "plain.gguf", "F32")
    for name, number in MIXES.items():
        write_gguf(source, tmp_path / "ours.gguf", name)
        ask_llama(tmp_path / "plain.gguf", quantise={"to": str(tmp_path / "theirs.gguf"), "type": number})
        ours, theirs = (
            {n: t.kind.name for n, t in GgufFile(tmp_path / f"{whose}.gguf").tensors.items()} for whose in ("ours", "theirs")
        )
        assert ours == theirs, name
