from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from twostroke.core.errors import CorruptFileError, DataError, InputError
from twostroke.core.paths import model_directory
from twostroke.core.recipe import DataRecipe
from twostroke.core.spec import ModelSpec
from twostroke.data.prepare import prepare
from twostroke.data.shards import PreparedData
from twostroke.data.tokenizer import train_tokenizer
from twostroke.evaluation.bits import bits_per_byte
from twostroke.evaluation.comparison import (
    block_nats,
    compare_on_text,
    model_bytes,
    open_sides,
    paired_difference,
)
from twostroke.evaluation.held_out import held_out_of, held_out_to_score
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.load import load_model
from twostroke.model.save import save_model


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedData:
    rng = np.random.default_rng(0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        lines = (" ".join(rng.choice(["cat", "dog", "tree", "runs", "home"], 9)) + "\n" for _ in range(20))
        (folder / f"{i}.txt").write_text("".join(lines))
    return prepare(DataRecipe(sources=(str(folder),), vocab_size=280, held_out_fraction=0.4), tmp_path / "cache")


def save(directory: Path, tokenizer: Path, vocab_size: int, seed: int, width: int = 32) -> Path:
    spec = ModelSpec("llama", vocab_size, 1, width, 4, 2, 8, 64, max_positions=32, tied_embeddings=True, eos_token_ids=(0,))
    decoder = Decoder(spec)
    initialise(decoder, seed)
    save_model(decoder, spec, directory, "fp32", tokenizer)
    return directory


def test_a_model_is_the_same_as_itself(prepared: PreparedData, tmp_path: Path) -> None:
    a = save(tmp_path / "a", prepared.tokenizer_path, prepared.vocab_size, 0)
    result = compare_on_text(*open_sides(a, a, "decoder"), held_out_of(prepared))
    assert result["difference_bits_per_byte"] == 0
    assert result["perplexity_ratio"] == 1
    assert result["size_ratio"] == 1
    assert result["b_is"] == "same"
    assert result["n_blocks"] == math.ceil(prepared.n_heldout_bytes / 4096)


def test_each_side_has_the_score_it_has_alone(prepared: PreparedData, tmp_path: Path) -> None:
    a = save(tmp_path / "a", prepared.tokenizer_path, prepared.vocab_size, 0)
    other = tmp_path / "other.json"
    entries = train_tokenizer(iter(["dog runs home tree"] * 3), 270, other).get_vocab_size()
    b = save(tmp_path / "b", other, entries, 1, width=64)
    text = held_out_of(prepared)
    result = compare_on_text(*open_sides(a, b, "decoder"), text)
    for side, directory in (("a", a), ("b", b)):
        alone = bits_per_byte(load_model(directory), text, tokenizer_path=directory, with_xz=False)
        assert result[side]["bits_per_byte"] == pytest.approx(alone.bits_per_byte, rel=1e-6)
        assert result[side]["n_tokens"] == alone.n_tokens
        assert result[side]["model_bytes"] == model_bytes(directory) > 0
    difference = result["b"]["bits_per_byte"] - result["a"]["bits_per_byte"]
    assert result["difference_bits_per_byte"] == pytest.approx(difference, rel=1e-6)
    assert result["b_is"] == "worse", "a tokenizer that makes more tokens costs an untrained model more bits"
    assert compare_on_text(*open_sides(b, a, "decoder"), text)["b_is"] == "better"


def test_the_standard_error_is_the_spread_of_the_means() -> None:
    """Against simulation: blocks with noise of 0.3 bits a byte; the spread of 2,000 estimates is the error that one states."""
    rng = np.random.default_rng(0)
    widths = np.full(50, 4096.0)
    widths[-1] = 1000
    estimates, errors = [], []
    for _ in range(2000):
        bits = (0.02 + 0.3 * rng.standard_normal(50)) * widths
        difference = paired_difference(np.zeros(50), bits * math.log(2), widths)
        estimates.append(difference.value)
        errors.append(difference.standard_error)
    assert np.mean(estimates) == pytest.approx(0.02, abs=4 * 0.3 / math.sqrt(50 * 2000))
    assert np.mean(errors) == pytest.approx(np.std(estimates), rel=0.06)  # both have about 2% of their own noise
    assert paired_difference(np.zeros(1), np.ones(1), np.ones(1)).standard_error == math.inf


def test_blocks_hold_all_of_the_cost() -> None:
    ends = np.array([0, 1, 4096, 4097, 8192, 9000, 9000])
    nats = np.arange(1, 8, dtype=np.float32)
    assert block_nats(ends, nats, 9000).tolist() == [1 + 2 + 3, 4 + 5, 6 + 7]


def test_a_run_names_its_model_and_its_held_out_text(prepared: PreparedData, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = save(run / "model", prepared.tokenizer_path, prepared.vocab_size, 0)
    assert model_directory(run) == model_directory(model) == model
    recipe = dataclasses.asdict(DataRecipe(sources=("stdlib",)))
    resolved = {"data_directory": str(prepared.directory), "data_key": prepared.key}
    (run / "recipe.json").write_text(json.dumps({"data": recipe, "resolved": resolved}))
    assert held_out_to_score(model).prepared == prepared
    (run / "recipe.json").write_text(json.dumps({"data": recipe, "resolved": resolved | {"data_key": "other"}}))
    with pytest.raises(DataError, match=r"is missing or has changed"):
        held_out_to_score(model)
    (run / "recipe.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"recipe.json does not name the run's data"):
        held_out_to_score(model)
    (run / "recipe.json").unlink()
    with pytest.raises(InputError, match=r"is not part of a training run"):
        held_out_to_score(model)
    with pytest.raises(InputError, match=r"--data or --prepared, not both"):
        held_out_to_score(model, ["stdlib"], prepared.directory)
    with pytest.raises(InputError, match=r"is not a model directory"):
        model_directory(tmp_path)


def test_data_prepared_again_serves_a_run_whose_cache_was_cleared(prepared: PreparedData, tmp_path: Path) -> None:
    recipe = DataRecipe(sources=(str(tmp_path / "corpus"),), vocab_size=280, held_out_fraction=0.4)
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    resolved = {"data_directory": str(tmp_path / "gone"), "data_key": prepared.key}
    (run / "recipe.json").write_text(json.dumps({"data": dataclasses.asdict(recipe), "resolved": resolved}))
    text = held_out_to_score(run / "model")
    assert text.prepared is not None
    assert text.prepared.files == prepared.files
