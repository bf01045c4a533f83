"""Training beside prefill beside decode: every promised row is there and marked, and takes its measurement beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from machines import ideal_machine, machine, small_llama
from twostroke.core.described import plain
from twostroke.core.families import read_spec
from twostroke.planner.choosing.comparison import COLUMNS, Comparison, compare, flip_batch, merge_measured, merge_ranges
from twostroke.planner.hardware.tables import load_hardware
from twostroke.planner.serving.plan import strategy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.text.comparison import comparison_text
from twostroke.planner.text.format import format_quantity, format_range
from twostroke.planner.text.serving import serving_text
from twostroke.planner.text.training import training_text
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.truth.intervals import with_intervals


@pytest.fixture
def table() -> Comparison:
    return compare(small_llama(), TrainingShape(steps=300), ServingShape(batch=8, prompt_tokens=256), machine(), "demo")


def test_every_promised_row_is_there(table: Comparison) -> None:
    labels = {row.label for row in table.rows}
    promised = {"passes in a step", "forward", "backward", "optimizer", "weights", "weights in memory", "gradients", "KV cache"}
    promised |= {"optimizer state", "activations", "FLOP a token", "bytes moved a token", "batch", "precision", "throughput"}
    promised |= {"latency", "to one more machine", "on disk", "whole run, energy", "whole run, money"}
    promised |= {"energy per million tokens", "money per million tokens"}
    for component in ("attention", "mlp", "norms", "embedding", "head", "optimizer"):
        promised |= {f"{component}: {what}" for what in ("share of the step", "intensity", "bound", "arithmetic-bound")}
    assert promised <= labels


def test_training_alone_goes_backward_and_updates(table: Comparison) -> None:
    for label in ("backward", "gradients", "optimizer state", "optimizer: bound"):
        assert set(table.row(label).cells) == {"train"}
    assert table.row("weights").cells["train"].value == "updated each step"
    assert table.row("weights").cells["decode"].value == "read-only"
    assert set(table.row("KV cache").cells) == {"prefill", "decode"}


def test_every_number_is_marked(table: Comparison) -> None:
    for row in table.rows:
        for cell in row.cells.values():
            assert cell.kind in ("predicted", "given")
            assert cell.kind == "given" or not isinstance(cell.value, str) or row.label.endswith("bound")
    assert any("assumed" in line for line in table.assumptions)


def test_shares_of_a_pass_add_up_to_one(table: Comparison) -> None:
    for column in COLUMNS:
        shares = [
            row.cells[column].value for row in table.rows if row.label.endswith("share of the step") and column in row.cells
        ]
        assert sum(float(s) for s in shares if s is not None) == pytest.approx(1.0)


def test_decode_is_bound_by_memory_and_training_by_arithmetic() -> None:
    table = compare(
        small_llama(d_model=1024, n_heads=16, n_kv_heads=4, d_ff=4096),
        TrainingShape(),
        ServingShape(prompt_tokens=512),
        ideal_machine(),
    )
    bound = table.row("mlp: bound").cells
    assert bound["train"].value == "arithmetic"
    assert bound["prefill"].value == "arithmetic"
    assert bound["decode"].value == "memory"
    intensity = table.row("mlp: intensity").cells
    assert float(intensity["decode"].value or 0) < 2 < float(intensity["train"].value or 0)


def test_the_batch_at_which_the_bound_flips_is_where_it_flips() -> None:
    """Decode's MLP: B·2 FLOP per weight of 2 bytes, so B flips at rate / bandwidth when activations are negligible."""
    hardware = ideal_machine(kind="gpu")  # 1e12 FLOP/s over 1e11 bytes/s: balance 10 FLOP per byte
    table = compare(small_llama(d_model=2048, n_heads=32, n_kv_heads=4, d_ff=8192), TrainingShape(), ServingShape(), hardware)
    flip = table.row("mlp: arithmetic-bound").cells["decode"]
    assert flip.unit == "requests"
    assert flip.value is not None
    batch = int(flip.value)
    assert 10 <= batch <= 14
    shape = ServingShape()

    def bound(n: int) -> str:
        works = strategy_of(table.serving.spec, shape, hardware).decode(n)
        return next(w for w in works if w.component == "mlp").bound

    assert bound(batch) == "arithmetic"
    assert bound(batch - 1) == "memory"
    assert table.row("attention: arithmetic-bound").cells["train"].value == 1
    assert table.row("optimizer: arithmetic-bound").cells["train"].value is None


@pytest.mark.parametrize(("threshold", "expected"), [(1, 1), (2, 2), (37, 37), (1024, 1024), (10**9, None)])
def test_flip_batch_finds_the_first(threshold: int, expected: int | None) -> None:
    assert flip_batch(lambda n: "arithmetic" if n >= threshold else "memory") == expected


def test_measurements_go_beside_their_predictions(table: Comparison) -> None:
    train = {"step_time_s": 1.5, "forward_s": 0.4, "train_tok_per_s": 5461.0, "train_time_s": 450.0, "weights_bytes": 1e7}
    serve = {"ttft_s": 0.05, "tpot_s": 0.004, "decode_tok_per_s": 2000.0, "output_tok_per_s": 1500.0, "kv_cache_bytes": 5e6}
    merged = merge_measured(table, train, serve)
    assert merged.row("latency").cells["train"].measured == 1.5
    assert merged.row("latency").cells["prefill"].measured == 0.05
    assert merged.row("latency").cells["decode"].measured == 0.004
    assert merged.row("forward").cells["decode"].measured == 0.004
    assert merged.row("KV cache").cells["decode"].measured == 5e6
    assert merged.row("weights in memory").cells["train"].measured == 1e7
    assert merged.row("weights in memory").cells["decode"].measured is None
    usd_per_s = table.hardware.usd_per_hour.value / 3600
    assert merged.row("money per million tokens").cells["decode"].measured == pytest.approx(1e6 / 2000 * usd_per_s)
    # (450 s of training) / (1/1500 s per served token), both at one price
    assert merged.measured_crossover_served_tokens == pytest.approx(450 * 1500)
    assert merged.row("latency").cells["train"].value == table.row("latency").cells["train"].value
    assert table.row("latency").cells["train"].measured is None


def test_without_measurements_nothing_is_measured(table: Comparison) -> None:
    merged = merge_measured(table, {}, {"words": "x", "flag": True, "ttft_s": None})
    assert all(cell.measured is None for row in merged.rows for cell in row.cells.values())
    assert merged.measured_crossover_served_tokens is None


def test_the_crossover_is_training_over_serving(table: Comparison) -> None:
    assert table.training.cost is not None
    served = table.crossover_served_tokens / 1e6 * table.serving.usd_per_mtok
    assert served == pytest.approx(table.training.cost.usd)


def test_the_table_is_plain_data(table: Comparison) -> None:
    record = json.loads(json.dumps(plain(table)))
    row = next(r for r in record["rows"] if r["label"] == "latency")
    assert row["train"]["unit"] == "s"
    assert row["train"]["kind"] == "predicted"
    assert record["columns"] == ["train", "prefill", "decode"]


@pytest.mark.parametrize("measured", [False, True])
def test_the_text_keeps_to_80_columns_and_with_measurements_to_120(table: Comparison, measured: bool) -> None:
    if measured:
        table = merge_measured(table, {"step_time_s": 1.5, "train_tok_per_s": 5461.0}, {"ttft_s": 0.05, "tpot_s": 0.004})
    text = comparison_text(table)
    assert max(map(len, text.split("\n"))) <= (120 if measured else 80)
    for word in ("TRAINING", "PREFILL", "DECODE", "predicted", "arithmetic", "crossover"):
        assert word in text
    assert ("measured" in text.split("\n")[2]) == measured


def test_ranges_stand_in_a_table_of_their_own_where_they_are_wide_enough(table: Comparison) -> None:
    trained = with_intervals(table.training.prediction(), "measured", "train")
    served = with_intervals(table.serving.prediction(), "measured", "serve")
    ranged = merge_ranges(table, trained, served)
    assert ranged.row("latency").cells["train"].low == trained["step_time_s"]["low"]
    assert ranged.row("latency").cells["decode"].high == served["tpot_s"]["high"]
    assert "90% range" not in comparison_text(table)
    text = comparison_text(ranged)
    assert max(map(len, text.split("\n"))) <= 80
    shown = text.split("90% range", 1)[1].split("\n\n", 1)[0]
    assert "\nlatency " in shown
    assert "\ngradients " not in shown  # counted to a part in a thousand
    assert shown.count("–") >= 10


@pytest.mark.parametrize(
    ("low", "high", "unit", "words"),
    [(0.88, 0.96, "s", "880–960 ms"), (0.9, 1.5, "s", "900 ms–1.5 s"), (0.155, 0.19, "share", "15.5%–19%")],
)
def test_a_range_names_a_unit_once_where_it_is_the_same(low: float, high: float, unit: str, words: str) -> None:
    assert format_range(low, high, unit) == words


def test_several_devices_wait_for_links_and_are_paid_for() -> None:
    """Two H100s train and serve: both are in the money, and what they wait for each other has a row."""
    spec, hardware = small_llama(), load_hardware("h100")
    pair = compare(
        spec, TrainingShape(16, 512), ServingShape(tensor=2, prompt_tokens=256), hardware, layout=Layout(data=2, zero=1)
    )
    assert pair.row("devices").cells["train"].value == "2: dp2 z1"
    assert pair.row("devices").cells["decode"].value == "2: tp2"
    assert float(pair.row("waiting for links").cells["train"].value or 0) == pytest.approx(pair.training.communication_s)
    assert float(pair.row("waiting for links").cells["decode"].value or 0) > 0
    rate = pair.serving.decode_tok_per_s
    expected = 2 * hardware.usd_per_hour.value * 1e6 / 3600 / rate
    assert float(pair.row("money per million tokens").cells["decode"].value or 0) == pytest.approx(expected)
    text = comparison_text(pair)
    assert "2: dp2 z1" in text
    assert max(map(len, text.split("\n"))) <= 120


def test_experts_and_latents_have_a_table_too(assets: Path) -> None:
    for name in ("mistralai--Mixtral-8x7B-v0.1_config.json", "deepseek-ai--DeepSeek-V3_config.json"):
        spec = read_spec(assets / "configs/hf" / name)
        text = comparison_text(compare(spec, TrainingShape(1, 512), ServingShape("int4", tensor=8), load_hardware("h200")))
        assert "a token passing" in text
        assert max(map(len, text.split("\n"))) <= 120


def test_plans_read_as_text() -> None:
    table = compare(small_llama(), TrainingShape(), ServingShape(), load_hardware("h100"))
    assert "MFU" in training_text(table.training, "demo")
    assert "TTFT" in serving_text(table.serving, "demo")
    assert "(--steps)" in comparison_text(table)
    big = compare(small_llama(), TrainingShape(batch_size=4096, sequence_length=1024), ServingShape(), load_hardware("l4"))
    assert training_text(big.training, "demo", remedy="Use more.").startswith("DOES NOT FIT: it takes ")
    assert comparison_text(big, "Use more.").startswith("DOES NOT FIT: it takes ")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "s", "250 ms"),
        (2**20, "bytes", "1 MiB"),
        (0.5, "usd", "$0.50"),
        (0.123, "share", "12.3%"),
        (0.0012, "kWh", "1.2 Wh"),
        (12.0, "kWh", "12 kWh"),
        (3.456, "FLOP/B", "3.46 FLOP/B"),
        (8300.0, "tok/s", "8.3k tok/s"),
        (1e9, "FLOP", "1G"),
        (1234.0, "", "1,234"),
        ("words", "", "words"),
        (None, "s", "–"),
    ],
)
def test_quantities_are_shown_in_their_unit(value: float | str | None, unit: str, text: str) -> None:
    assert format_quantity(value, unit) == text
