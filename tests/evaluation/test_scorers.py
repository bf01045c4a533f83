"""Both engines give the same scores and continuations, on random models of every family and on a trained one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from real_model import make_model
from small_models import SPECS, saved
from twostroke.core.errors import ConfigError, DataError, InputError
from twostroke.evaluation.decoder_scorer import DecoderScorer
from twostroke.evaluation.encoding import Encoder
from twostroke.evaluation.engine_scorer import EngineScorer
from twostroke.evaluation.engines import engine_for, open_scorer
from twostroke.evaluation.scorer import Scorer
from twostroke.evaluation.task_files import load_task, task_names
from twostroke.interop.import_model import import_model
from twostroke.quantization.convert import quantize_model


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def stories(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "stories260K"
    import_model(str(assets / "weights/stories260K/stories260K.bin"), directory)
    return directory


def both(directory: Path) -> tuple[Scorer, Scorer]:
    return open_scorer(directory, "decoder", "fp32"), open_scorer(directory, "inference", "fp32")


@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_engines_agree_on_every_family(name: str, tmp_path: Path) -> None:
    from twostroke.core.engine_settings import EngineSettings
    from twostroke.engine.core import EngineCore
    from twostroke.engine.scoring import token_scores

    decoder, directory = saved(name, tmp_path / "model")
    rng = random.Random(1)
    sequences = [([rng.randrange(97) for _ in range(n)], rng.randint(1, n)) for n in (2, 3, 50, 51, 120, 9, 7, 64)]
    ours = DecoderScorer(decoder, None).token_scores(sequences)  # type: ignore[arg-type]
    theirs = token_scores(EngineCore(directory, EngineSettings(dtype="fp32", n_threads=1)), sequences)
    for (a, greedy_a), (b, greedy_b) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)  # fp32 sums in another order, logits of some 10
        assert greedy_a.tolist() == greedy_b.tolist()


def test_padding_and_neighbours_change_nothing(model: Path) -> None:
    """A pass of many rows against each sequence alone."""
    scorer = DecoderScorer.load(model)
    rng = random.Random(2)
    sequences = [([rng.randrange(512) for _ in range(rng.randint(2, 90))], 1) for _ in range(120)]
    for sequence, (nats, _) in zip(sequences, scorer.token_scores(sequences), strict=True):
        np.testing.assert_allclose(nats, scorer.token_scores([sequence])[0][0], atol=1e-4)
    assert scorer.token_scores([([3], 1), ([], 1)])[0][0].size == 0


def test_greedy_text_is_the_same_and_ends_where_it_should(model: Path) -> None:
    decoder, inference = both(model)
    prompts = [Encoder(decoder).encode(text) for text in ("def main(", "class Parser:", "import")]
    texts = decoder.continue_greedily(prompts, 12)
    assert texts == inference.continue_greedily(prompts, 12)
    assert all(texts)
    stop = texts[0][len(texts[0]) // 2 :][:2]
    cut = decoder.continue_greedily(prompts, 12, (stop,))
    assert cut == inference.continue_greedily(prompts, 12, (stop,))
    assert cut[0] == texts[0][: texts[0].index(stop)]
    full = [list(range(1, 511))]  # leaves room for two of the context's 512 tokens
    assert decoder.continue_greedily(full, 12) == inference.continue_greedily(full, 12)


def test_the_engines_agree_on_real_tasks_with_a_trained_model(stories: Path, assets: Path) -> None:
    decoder, inference = both(stories)
    for name in task_names():
        task = load_task(name, assets / "eval")
        if name == "gsm8k":
            task = type(task)(**vars(task) | {"shots": 1, "max_tokens": 8})
        a, b = (task.run(scorer, limit=6) for scorer in (decoder, inference))
        assert a.key == b.key
        assert a.n_examples == 6
        for metric, values in a.scores.items():
            # Sums of up to a hundred tokens' nats, each off by some 1e-5.
            np.testing.assert_allclose(values, b.scores[metric], atol=5e-3, err_msg=f"{name} {metric}")


def test_a_story_that_the_model_wrote_is_what_it_finds_probable(stories: Path, assets: Path) -> None:
    """The published greedy continuation: each of its tokens is the most probable one."""
    ids = json.loads((assets / "weights/stories260K/expected_greedy_200_ids.json").read_text())["greedy_token_ids"]
    assert ids[0] == 1, "the beginning-of-text token"
    for scorer in both(stories):
        nats, greedy = scorer.token_scores([(ids, 1)])[0]
        assert greedy.all()
        assert nats.mean() < 0.7


def test_quantised_weights_are_scored_by_the_engine_that_serves_them(model: Path, tmp_path: Path) -> None:
    quantize_model(model, tmp_path / "int8", "int8")
    assert engine_for(tmp_path / "int8") == "inference"
    assert engine_for(model) == "decoder"
    scorer = open_scorer(tmp_path / "int8", dtype="bf16")
    assert isinstance(scorer, EngineScorer)
    assert scorer.dtype == "int8"
    with pytest.raises(ConfigError, match="engine='vllm' is not known"):
        engine_for(model, "vllm")


def test_sequences_that_cannot_be_read_are_refused(model: Path, tmp_path: Path) -> None:
    scorer = DecoderScorer.load(model)
    with pytest.raises(InputError, match="token 512 is not in the model's vocabulary of 512"):
        scorer.token_scores([([1, 512], 1)])
    with pytest.raises(InputError, match=r"514 tokens is longer than the model's max_positions=512 \+ 1"):
        scorer.token_scores([([1] * 514, 1)])
    with pytest.raises(InputError, match="first=0"):
        scorer.token_scores([([1, 2], 0)])
    (model / "tokenizer.json").rename(tmp_path / "kept")
    try:
        with pytest.raises(DataError, match=r"no tokenizer\.json"):
            EngineScorer.load(model, "fp32")
    finally:
        (tmp_path / "kept").rename(model / "tokenizer.json")
