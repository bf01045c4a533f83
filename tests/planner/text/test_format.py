"""What all plans are written with: results with their ranges, tables within a width, what does not fit."""

from __future__ import annotations

from machines import machine
from twostroke.planner.text.format import (
    WIDTH,
    Result,
    fits_lines,
    format_intensity,
    results_table,
    with_wrapped_notes,
    wrapped,
)
from twostroke.planner.truth.intervals import with_intervals

RESULTS = [Result("step", "step_time_s", "65.2 ms", "8k tokens"), Result("memory", "peak_memory_bytes", "1 GiB")]


def test_results_are_shown_with_their_ends_and_the_source_of_the_width() -> None:
    found = with_intervals({"step_time_s": 0.0652, "peak_memory_bytes": 2.0**30, "mfu": 0.3}, "measured", "train")
    found["step_time_s"] |= {"low": 0.059, "high": 0.0925, "width": "measured"}
    found["peak_memory_bytes"] |= {"low": 2.0**29, "high": 2.0**31, "width": "assumed"}
    text = results_table(RESULTS, found)
    head, step, memory, sentence = text.split("\n")
    assert step.split() == ["step", "65.2", "ms", "[59–92.5]", "8k", "tokens"]
    assert memory.split() == ["memory", "1", "GiB", "[0.5–2]"]
    assert "90% range" in head
    assert sentence == "range: 90% of measurements should fall inside it; widths assumed for memory."
    assert "mfu" not in text


def test_without_intervals_the_values_stand_alone() -> None:
    text = results_table(RESULTS, {"step_time_s": {"value": None}})
    assert "range" not in text
    assert "65.2 ms" in text


def test_a_busy_calibration_is_said_beside_the_results_unless_it_rounds_to_nothing() -> None:
    found = with_intervals({"step_time_s": 0.0652}, "measured", "train", low_by=0.31)
    text = " ".join(results_table(RESULTS, found, 0.31).split())
    assert "rates may read 31% low" in text
    assert "twostroke calibrate" in text
    assert "busy" not in results_table(RESULTS, found)
    assert "busy" not in results_table(RESULTS, found, 0.004)


def test_a_long_note_goes_on_below_itself() -> None:
    text = with_wrapped_notes([["a", "one word after another " * 9], ["longer", "short"]])
    lines = text.split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert all(line.startswith(" " * 8) for line in lines[1:-1])
    assert lines[-1] == "longer  short"


def test_what_does_not_fit_is_said_first_with_the_remedy_and_nothing_of_what_fits() -> None:
    device = machine()
    lines = fits_lines(2 * device.memory_bytes, 4, device, "Use more.")
    assert lines[0].startswith("DOES NOT FIT: it takes")
    assert "on each of 4 devices" in " ".join(lines)
    assert lines[-2:] == ["Use more.", ""]
    assert fits_lines(device.memory_bytes, 1, device, "Use more.") == []


def test_an_intensity_has_no_more_digits_than_are_known() -> None:
    assert [format_intensity(value) for value in (0, 0.2314, 7.27, 999.6)] == ["–", "0.23 FLOP/B", "7.3 FLOP/B", "1,000 FLOP/B"]


def test_a_line_never_ends_between_a_number_and_its_unit() -> None:
    text = "\n".join(wrapped([f"{'x' * 74} 102 ms", f"{'x' * 73} 1.5 GiB"]))
    assert text.split("\n") == ["x" * 74, "  102 ms", "x" * 73, "  1.5 GiB"]
