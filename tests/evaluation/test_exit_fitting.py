"""Fitted exits keep the share of changed tokens that was asked for, and are measured as they will be served."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from small_models import saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError, DataError
from twostroke.core.fitted_exits import NEVER, read_fitted_exits
from twostroke.engine.core import EngineCore
from twostroke.engine.early_exit import confidence
from twostroke.evaluation.exit_fitting import THRESHOLDS, fit_exits, forced, p_value, windows_of
from twostroke.kernels.native_library import library, why_absent
from twostroke.model.load import load_model
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())

IDS = np.random.default_rng(3).integers(0, 97, 24 * 40)
TEXTS = windows_of(IDS, 24)  # 8 tokens of prompt and 16 of answer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """Models of three layers by how much those behind the first count: with 0 the exit after it is always right."""
    folder = tmp_path_factory.mktemp("models")
    made = {1.0: saved("llama", folder / "1.0")[1]}
    for weight in (0.0, 0.3):
        decoder = load_model(made[1.0])
        with torch.no_grad():
            decoder.head_weight.mul_(8)  # surer than random weights are
            for block in decoder.blocks[1:]:
                block.get_submodule("attn.out").weight.mul_(weight)
                block.get_submodule("mlp.down").weight.mul_(weight)
        made[weight] = folder / str(weight)
        save_model(decoder, decoder.spec, made[weight])
    return made


def engine(path: Path) -> EngineCore:
    return EngineCore(path, EngineSettings(dtype="fp32", n_threads=1, early_exit="at:1"))


def test_texts_do_not_overlap_and_come_from_everywhere() -> None:
    ids = np.arange(96 * 400)
    texts = windows_of(ids, 2048)
    assert len(texts) == 256
    assert all(len(text) == 96 for text in texts)
    assert len({token for text in texts for token in text}) == 256 * 96
    assert min(text[0] for text in texts) < 96 * 10 < 96 * 390 < max(text[0] for text in texts)
    with pytest.raises(DataError, match="32 are needed"):
        windows_of(ids[: 96 * 31], 2048)


@pytest.mark.parametrize("most", [0.02, 0.1, 0.5])
def test_a_share_above_the_limit_is_rarely_rejected(most: float) -> None:
    """Of losses whose mean is the limit itself, at most 5 in 100 runs may be told from them; 2 standard errors are allowed."""
    draws = np.random.default_rng(1).random((1500, 120)) < most
    wrong = np.mean([p_value(losses.astype(float), most) <= 0.05 for losses in draws])
    assert wrong <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 1500)


def test_a_share_well_below_the_limit_is_rejected_and_one_above_is_not() -> None:
    r = np.random.default_rng(2)
    assert p_value(np.zeros(256), 0.05) < 0.002
    assert p_value(r.beta(1, 40, 256), 0.05) < 0.01
    assert p_value(r.beta(1, 10, 256), 0.05) > 0.5
    assert p_value(np.ones(256), 0.05) == 1.0


def test_forced_decoding_is_a_dense_pass_in_which_rows_that_left_stay_as_they_are(models: dict[float, Path]) -> None:
    core, decoder = engine(models[0.3]), load_model(models[0.3])
    n_layers, n_prompt = 3, 8
    depths: Tensor = torch.full((len(TEXTS), 23), n_layers)
    may_leave = torch.arange(23) >= n_prompt  # the row of the answer's first token passes all
    threshold = 0.2

    def after_block(layer: int, before: Tensor, after: Tensor) -> Tensor:
        after = torch.where((depths > layer)[..., None], after, before)
        if layer + 1 < n_layers:
            sure = confidence(decoder.logits(decoder.read_out(after)).flatten(0, 1)).view(depths.shape) >= threshold
            depths[sure & may_leave & (depths > layer)] = layer + 1
        return after

    decoder.after_block = after_block
    with torch.no_grad():
        logits = decoder(torch.tensor(TEXTS)[:, :-1])
    core.leave_after((1, 2), threshold)
    found = forced(core, TEXTS)
    wanted = -logits.log_softmax(-1).gather(-1, torch.tensor(TEXTS)[:, 1:, None])[:, n_prompt - 1 :, 0]
    np.testing.assert_array_equal(found.tokens, logits.argmax(-1)[:, n_prompt - 1 :].numpy())
    np.testing.assert_allclose(found.nats, wanted.numpy(), atol=2e-3)
    assert found.depths == {n: int((depths[:, n_prompt:] == n).sum()) for n in (1, 2, 3)}
    assert min(found.depths.values()) > 0
    assert not core.has_work
    assert core.stats().pages_used == 0


def test_an_exit_that_is_always_right_is_taken_at_the_lowest_threshold(models: dict[float, Path]) -> None:
    fitted = fit_exits(engine(models[0.0]), models[0.0], TEXTS, (1, 2), most_changed=0.2)
    assert fitted.threshold == THRESHOLDS[-1]
    assert fitted.changed == 0.0
    assert abs(fitted.extra_nats) < 1e-5
    assert fitted.shares[0] > 0.5
    assert fitted.predicted_speed > 1
    assert fitted.n_tokens == 15 * len(TEXTS)


def test_a_threshold_keeps_the_share_and_the_next_one_is_not_shown_to(models: dict[float, Path]) -> None:
    path = models[0.3]
    fitted = fit_exits(engine(path), path, TEXTS, (1, 2), most_changed=0.2)
    assert THRESHOLDS[-1] < fitted.threshold < THRESHOLDS[0]
    assert 0 < fitted.changed < 0.2
    core = engine(path)
    core.leave_after((1, 2), NEVER)
    whole = forced(core, TEXTS)
    assert whole.depths == {1: 0, 2: 0, 3: fitted.n_tokens}
    changed = []
    for threshold in (fitted.threshold, THRESHOLDS[THRESHOLDS.index(fitted.threshold) + 1]):
        core.leave_after((1, 2), threshold)
        changed.append((forced(core, TEXTS).tokens != whole.tokens)[:, 1:].mean(axis=1))
    assert changed[0].mean() == fitted.changed
    assert p_value(changed[0], 0.2) <= 0.05 < p_value(changed[1], 0.2)
    fitted.write(path)
    assert read_fitted_exits(path) == fitted
    served = EngineCore(path, EngineSettings(dtype="fp32", n_threads=1, early_exit="auto"))
    assert served.exits is not None
    assert (served.exits.layers, served.exits.threshold) == ((1, 2), fitted.threshold)
    (path / "early_exit.json").unlink()


def test_too_small_an_allowance_is_a_sentence(models: dict[float, Path]) -> None:
    with pytest.raises(DataError, match=r"does not show that at most 0\.1% do"):
        fit_exits(engine(models[0.3]), models[0.3], TEXTS, (1,), most_changed=0.001)


def test_thresholds_change_only_between_requests(models: dict[float, Path]) -> None:
    core = engine(models[1.0])
    for layers in ((), (3,), (2, 1), (0,)):
        with pytest.raises(ConfigError, match="exits after layers"):
            core.leave_after(layers, 0.5)
    core.add_request("a", [1, 2, 3], replace(SamplingParams(temperature=0.0), max_tokens=4))
    with pytest.raises(Exception, match="under way"):
        core.leave_after((1,), 0.5)
