from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.errors import InputError
from twostroke.data.mixture import Mixture

WEIGHTS = st.lists(st.one_of(st.integers(1, 50), st.floats(1e-3, 1e3)), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(weights=WEIGHTS)
def test_every_prefix_is_within_one_window_of_the_shares(weights: list[float]) -> None:
    n = 2000
    sources, places = Mixture(weights).take(n)
    shares = np.array(weights, dtype=np.float64) / sum(weights)
    given_so_far = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    off = np.abs(given_so_far - np.arange(1, n + 1)[:, None] * shares)
    # The bound of the rule; 1e-9 for the products in double precision here, the mixture itself counts in whole numbers.
    assert off.max() <= 1 - 1 / max(2, 2 * len(weights) - 2) + 1e-9
    for source in range(len(weights)):
        assert places[sources == source].tolist() == list(range(given_so_far[-1, source])), "each source in its own order"


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, cuts=st.lists(st.integers(0, 50), max_size=6))
def test_the_sequence_does_not_depend_on_how_it_is_taken_or_resumed(weights: list[float], cuts: list[int]) -> None:
    whole = Mixture(weights).take(sum(cuts) + 20)
    sources, places = [], []
    mixture, done = Mixture(weights), 0
    for n in [*cuts, 20]:
        part = mixture.take(n)
        sources += part[0].tolist()
        places += part[1].tolist()
        done += n
        state = json.loads(json.dumps(mixture.state()))
        mixture = Mixture(weights)
        mixture.restore(state, done)
    assert (sources, places) == (whole[0].tolist(), whole[1].tolist())


def test_shares_do_not_drift_over_a_billion_windows() -> None:
    mixture = Mixture([1 / 3, 0.1, 7])
    mixture.given = [round(10**9 * share) for share in mixture.shares]
    n = sum(mixture.given)
    sources, _ = mixture.take(1000)
    counts = np.bincount(sources, minlength=3) + np.array(mixture.given) * 0
    assert np.abs(np.array(mixture.given) - (n + 1000) * np.array(mixture.shares)).max() < 1 + 1e-4
    assert counts.tolist() == pytest.approx([1000 * share for share in mixture.shares], abs=2)


def test_equal_weights_alternate_and_decimal_weights_are_exact() -> None:
    assert Mixture([1, 1, 1]).take(6)[0].tolist() == [0, 1, 2, 0, 1, 2]
    sources, _ = Mixture([0.7, 0.2, 0.1]).take(1000)
    assert np.bincount(sources).tolist() == [700, 200, 100]
    assert Mixture([0.3]).take(3)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "n"),
    [
        ({"source_0": 5, "source_1": 5}, 9),
        ({"source_0": 10, "source_1": 0}, 10),
        ({"source_0": 5}, 5),
        ({"source_0": -1, "source_1": 1}, 0),
        ({"source_0": True, "source_1": 0}, 1),
        ({"source_0": 0.5, "source_1": 0.5}, 1),
    ],
)
def test_counts_that_cannot_be_are_refused(state: dict[str, int], n: int) -> None:
    mixture = Mixture([1, 1])
    with pytest.raises(InputError, match=r"are not those of"):
        mixture.restore(state, n)
    assert mixture.given == [0, 0]
