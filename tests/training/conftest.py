"""A small corpus with its tokenizer, tiny recipes over it, and one thread: at this size a second only waits."""

from __future__ import annotations

import keyword
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import RankRunner

from twostroke.core.policy import multiplies_bf16
from twostroke.core.profile import BandwidthPoint, MachineProfile, MatmulPoint, read_fingerprint, save_profile
from twostroke.core.recipe import TrainRecipe, recipe_from_dict
from twostroke.data.tokenizer import train_tokenizer

WORDS = [*"=():,.+[]012", *keyword.kwlist]

MakeRecipe = Callable[..., TrainRecipe]

MULTIPLIES_BF16 = multiplies_bf16("cpu", read_fingerprint().isa)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty files of about a kilobyte whose words follow one another with a pattern that can be learned."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(40):
        words, place = [], draw.randrange(len(WORDS))
        for _ in range(220):
            words.append(WORDS[place])
            place = (3 * place + draw.choice((1, 1, 1, 2))) % len(WORDS)
        (folder / f"{number:02d}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer((file.read_text() for file in sorted(corpus.iterdir())), 300, path)
    return path


@pytest.fixture
def make_recipe(corpus: Path, tokenizer: Path, tmp_path: Path) -> MakeRecipe:
    """``make_recipe("name", steps=3, …)``: a tiny uncompiled run into tmp_path/name; keywords but model=… go to [train]."""

    def make(name: str = "run", model: dict[str, Any] | None = None, **train: Any) -> TrainRecipe:
        sizes = {"family": "llama", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48}
        settings = {"steps": 4, "batch_size": 2, "sequence_length": 32, "compile": False, "warmup_fraction": 0.25}
        table = {
            "output": str(tmp_path / name),
            "model": sizes if model is None else model,
            "data": {"sources": [str(corpus)], "tokenizer": str(tokenizer)},
            "train": settings | train,
        }
        return recipe_from_dict(table)

    return make


@pytest.fixture
def profile() -> MachineProfile:
    """An invented machine, stored as this one's profile."""
    points = tuple(MatmulPoint(s, m, 64, 64, 1e11) for s in ("fp32", "bf16") for m in (1, 64))
    made = MachineProfile(
        fingerprint=read_fingerprint(),
        measured_at="2026-01-01T00:00:00Z",
        device="cpu",
        n_threads=1,
        torch_version="2",
        read_bandwidth=(BandwidthPoint(2**25, 1e10),),
        matmul=points,
        peak_flop_per_s={"fp32": 1e11} | ({"bf16": 2e11} if MULTIPLIES_BF16 else {}),
        op_launch_s=1e-5,
        linear_launch_s=1e-5,
        disk_write_bytes_per_s=1e9,
    )
    save_profile(made)
    return made


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> RankRunner:
    return RankRunner(tmp_path_factory.mktemp("ledger"))
