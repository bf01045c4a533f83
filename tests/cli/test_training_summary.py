from __future__ import annotations

from pathlib import Path
from typing import Any

from twostroke.cli.training_summary import summary_text

MEASURED = {
    "train_time_s": 66.0, "step_time_s": 0.0652, "forward_s": 0.02, "backward_s": 0.03, "optimizer_s": 0.01, "data_s": 0.001,
    "train_tok_per_s": 15_700.0, "mfu": 0.382, "peak_memory_bytes": 5 * 2**28, "startup_s": 4.2, "heldout_bits_per_byte": 1.25,
    "xz_bits_per_byte": 1.5,
}  # fmt: skip


def _summary(**more: Any) -> dict[str, Any]:
    values = {"steps": 1000, "tokens": 1_024_000, "final_loss": 3.25, "skipped_steps": 0, "measurement": MEASURED}
    return values | {"prediction": {"train_time_s": 60.0, "step_time_s": 0.06, "peak_memory_bytes": 2**30}} | more


def test_predicted_stands_beside_measured_in_80_columns() -> None:
    text = summary_text(Path("runs/x"), _summary())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "held out  1.2500 bits per byte measured (xz -9 of that text: 1.5000, below)" in lines
    cells = {line[:12].strip(): line[12:].split() for line in lines[4:]}
    assert cells["time"] == ["1", "min", "0", "s", "1", "min", "6", "s", "-9.1%"]
    assert cells["a step"] == ["60", "ms", "65.2", "ms", "-8.0%"]
    assert cells["peak memory"] == ["1", "GiB", "1.25", "GiB", "-20.0%"]
    assert cells["speed"] == ["–", "15.7k", "tok/s", "–"]  # measured, not predicted


def test_without_a_prediction_it_says_what_is_missing() -> None:
    text = summary_text(Path("runs/x"), _summary(prediction={}, skipped_steps=2))
    assert "predicted " not in text.replace("Nothing was predicted", "")
    assert "Nothing was predicted: `twostroke calibrate` first." in text
    assert "skipped   2 steps" in text
