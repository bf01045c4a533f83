"""The points of a sweep, and when the last of its jobs ends."""

from __future__ import annotations

import pytest

from twostroke.core.errors import ConfigError
from twostroke.core.grid import MOST_POINTS, makespan, points_of


def test_all_combinations_and_the_last_key_changes_fastest() -> None:
    points = points_of(["train.optimizer=adamw,muon", "train.learning_rate=1e-3, 3e-4"])
    assert [point.settings for point in points] == [
        ["train.optimizer=adamw", "train.learning_rate=1e-3"],
        ["train.optimizer=adamw", "train.learning_rate=3e-4"],
        ["train.optimizer=muon", "train.learning_rate=1e-3"],
        ["train.optimizer=muon", "train.learning_rate=3e-4"],
    ]
    assert points[0].name == "optimizer=adamw,learning_rate=1e-3"


def test_commas_inside_brackets_and_quotes_part_nothing() -> None:
    points = points_of(["train.betas=[0.9, 0.95],[0.9, 0.99]", 'data.sources=["a,b"]'])
    assert [point.values["train.betas"] for point in points] == ["[0.9, 0.95]", "[0.9, 0.99]"]
    assert points[0].values["data.sources"] == '["a,b"]'
    assert points[0].name == "betas=-0.9-0.95-,sources=-a-b-"


def test_a_points_name_does_not_depend_on_the_others_and_fits_a_file_system() -> None:
    assert points_of(["a.b=1,2"])[1].name == points_of(["a.b=7,2,1"])[1].name
    long = points_of([f"data.sources={'x' * 400}"])[0].name
    assert len(long) <= 120
    assert long != points_of([f"data.sources={'x' * 401}"])[0].name


@pytest.mark.parametrize(
    ("varied", "sentence"),
    [
        ([], "a sweep varies something"),
        (["train.steps"], "must look like"),
        (["=1,2"], "must look like"),
        (["train.steps=1,,2"], "must look like"),
        (["train.steps=1,2", "train.steps=3"], "names train.steps twice"),
        (["train.steps=1,2,1"], "has the value 1 twice"),
        (["output=a,b"], "a directory of its own"),
        (['train.x="a",a,-a-'], "would share the directory"),
        ([f"a.{letter}={','.join(map(str, range(11)))}" for letter in "bcd"], f"at most {MOST_POINTS:,}"),
    ],
)
def test_what_is_no_grid_is_refused(varied: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        points_of(varied)


@pytest.mark.parametrize(("at_once", "expected"), [(1, 10.0), (2, 6.0), (4, 4.0), (9, 4.0)])
def test_each_job_starts_as_soon_as_a_place_is_free(at_once: int, expected: float) -> None:
    assert makespan([1.0, 2.0, 3.0, 4.0], at_once) == expected
