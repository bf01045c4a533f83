from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from real_model import make_model
from twostroke.core.errors import InputError
from twostroke.evaluation.bits import token_nats
from twostroke.evaluation.decoder_scorer import DecoderScorer
from twostroke.evaluation.engine_scorer import EngineScorer
from twostroke.evaluation.stream import stream_nats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(("context", "stride"), [(64, 48), (64, 64), (20, 1), (300, 100), (512, 512)])
def test_a_stream_has_the_same_cost_through_either_engine(model: Path, context: int, stride: int) -> None:
    """Documents of one token to hundreds, empty ones among them, windows that end inside and between them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 512, 260)
    ids[rng.integers(0, 260, 12)] = 0
    ids[[40, 41, 42]] = 0
    decoder = DecoderScorer.load(model)
    want = token_nats(decoder.decoder, ids, 0, context, stride)
    engine = EngineScorer.load(model, "fp32")
    for scorer in (decoder, engine):
        np.testing.assert_allclose(stream_nats(scorer, ids, 0, context, stride), want, atol=2e-4)


def test_the_shortest_streams_and_a_bad_stride(model: Path) -> None:
    decoder = DecoderScorer.load(model)
    for n in (1, 2, 3):
        ids = np.arange(5, 5 + n)
        np.testing.assert_allclose(stream_nats(decoder, ids, 0, 8, 8), token_nats(decoder.decoder, ids, 0, 8, 8), atol=1e-5)
    with pytest.raises(InputError, match="stride=9 must be between 1 and context=8"):
        stream_nats(decoder, ids, 0, 8, 9)
