"""A plan's text shows intervals of what was predicted, and says whether their widths were measured."""

from __future__ import annotations

from twostroke.planner.text.format import intervals_text
from twostroke.planner.truth.intervals import with_intervals


def test_the_headlines_are_shown_with_their_ends_and_the_source_of_the_width() -> None:
    found = with_intervals({"step_time_s": 0.0652, "peak_memory_bytes": 2.0**30, "mfu": 0.3}, "measured", "train")
    found["step_time_s"] |= {"low": 0.059, "high": 0.0925, "width": "measured"}
    found["peak_memory_bytes"] |= {"low": 2.0**29, "high": 2.0**31, "width": "assumed"}
    text = intervals_text(found)
    assert text.startswith("range     step 65.2 ms [59–92.5], peak 1 GiB [0.5–2]; 90% of measurements")
    assert "(widths assumed for peak)" in " ".join(text.split())
    assert "mfu" not in text
    assert max(map(len, text.split("\n"))) <= 118


def test_nothing_predicted_is_nothing_shown() -> None:
    assert intervals_text({}) == ""
    assert intervals_text({"step_time_s": {"value": None}}) == ""


def test_a_busy_calibration_is_said_beside_the_range() -> None:
    found = with_intervals({"step_time_s": 0.0652}, "measured", "train", low_by=0.31)
    text = " ".join(intervals_text(found, 0.31).split())
    assert "rates may read 31% low" in text
    assert "twostroke calibrate" in text
    assert "busy" not in intervals_text(found)
