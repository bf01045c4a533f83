"""Makes the cards at the top of the report. Each has one number, one line, and a folded table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twostroke.core.errors import TwostrokeError
from twostroke.core.profile import MachineProfile, load_profile, read_fingerprint
from twostroke.core.units import format_bytes, format_count, format_flop_rate, format_seconds
from twostroke.ledger.attribution import pool
from twostroke.ledger.scoring import compare, number_of, quantile, summarise
from twostroke.ledger.store import Run
from twostroke.ledger.text import format_error, format_inside, format_interval, format_value


@dataclass(frozen=True)
class Table:
    """A table of the page. ``columns`` are headings, and ``rows`` have as many cells; a row of one cell is a sub-heading.
    ``folded`` are further rows, which the reader unfolds together with ``note``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Card:
    """A card shows ``number``, and ``line`` says what it is. The reader can unfold ``table``."""

    title: str
    number: str
    line: str
    table: Table | None = None


def cards_of(runs: Sequence[Run], newest: Mapping[str, Run]) -> list[Card]:
    """The cards of all ``runs`` and of the ``newest`` run of each kind."""
    cards = [*_score_cards(runs)]
    if "train" in newest:
        cards.append(_training_card(newest["train"]))
    if "bench" in newest:
        cards.append(_load_card(newest["bench"]))
    if "serve" in newest:
        cards.append(_server_card(newest["serve"]))
    machine = _machine_card(runs)
    return [*cards, *([machine] if machine else [])]


# -- the quality of predictions -------------------------------------------------------------------------------------------


def _score_cards(runs: Sequence[Run]) -> list[Card]:
    rows = [row for run in runs for row in compare(run) if row.error_percent is not None]
    inside = [row.inside for row in rows if row.inside is not None]
    cards = []
    if rows:
        median = quantile([abs(row.error_percent or 0.0) for row in rows], 0.5)
        line = f"median error of {len(rows)} predictions, each frozen before its run ({_of_runs(len(runs))})"
        cards.append(Card("Predicted against measured", f"{median:.0f}%", line, _scores_table(runs)))
    if inside:
        share = 100 * sum(inside) / len(inside)
        line = f"of measurements inside their interval, {sum(inside)} of {len(inside)}; the aim is 90%"
        cards.append(Card("Intervals", f"{share:.0f}%", line, _terms_table(runs)))
    return cards


def _of_runs(n: int) -> str:
    return f"{n} run{'' if n == 1 else 's'}"


def _scores_table(runs: Sequence[Run]) -> Table:
    rows = [
        [
            s.name,
            str(s.n_runs),
            f"{s.median_abs_error_percent:.1f}%",
            f"{s.p90_abs_error_percent:.1f}%",
            f"{s.median_error_percent:+.1f}%",
            f"{s.n_inside} of {s.n_intervals}" if s.n_intervals else "–",
        ]
        for s in summarise(runs)
    ]
    return Table(
        "All predictions so far", ("", "runs", "median |error|", "p90 |error|", "median error", "inside interval"), rows
    )


def _terms_table(runs: Sequence[Run]) -> Table | None:
    """The terms of each total over all runs, the worst first."""
    rows: list[list[str]] = []
    total = None
    for share in pool(runs):
        if share.total != total:
            total = share.total
            rows.append([total])
        percents = (f"{share.median_abs_percent:.1f}%", f"{share.median_percent:+.1f}%")
        rows.append([share.part, str(share.n_runs), *percents, str(share.worst_in)])
    note = "Each total's error, divided among its terms, in percent of the measured total; medians over the runs."
    columns = ("", "runs", "median |share|", "median share", "largest share in")
    return Table("Which term misses most", columns, rows, note) if rows else None


# -- the newest run of each kind ------------------------------------------------------------------------------------------


def _run_table(run: Run) -> Table:
    rows = [
        [
            r.name,
            format_interval(r.name, r.predicted, r.low, r.high),
            format_value(r.name, r.measured),
            format_error(r.error_percent),
            format_inside(r.inside),
        ]
        for r in compare(run)
    ]
    note = f"{run.run_id} · {run.subject} · {run.status} · frozen {run.frozen_at} · code {run.code_version}"
    columns = ["", "predicted [interval]", "measured", "error", ""]
    if not run.prediction:  # a phone would show a column of dashes, and none of what was measured
        columns, rows = [columns[0], columns[2]], [[row[0], row[2]] for row in rows]
    return Table("Number by number", columns, rows, note)


def _beside(run: Run, name: str) -> str:
    """``, 9.97k tok/s predicted`` if the run has a prediction of ``name``, else nothing."""
    predicted = number_of(run.prediction.get(name))
    return f", {format_value(name, predicted)} predicted" if predicted else ""


def _first(run: Run, *names: str) -> tuple[str, float] | None:
    """The first of ``names`` that the run measured, with its value."""
    return next(((name, value) for name in names if (value := number_of(run.measurement.get(name)))), None)


def _training_card(run: Run) -> Card:
    found = _first(run, "train_tok_per_s", "step_time_s")
    number, line = ("–", run.status) if found is None else (format_value(*found), f"measured{_beside(run, found[0])}")
    bits, xz = (number_of(run.measurement.get(name)) for name in ("heldout_bits_per_byte", "xz_bits_per_byte"))
    if bits:
        line += f"; held-out text takes {bits:.3f} bits per byte" + (f", with xz -9 {xz:.3f}" if xz else "")
    return Card("Training", number, line, _run_table(run))


def _load_card(run: Run) -> Card:
    found = _first(run, "output_tok_per_s", "decode_tok_per_s", "tpot_s", "ttft_s")
    number, line = ("–", run.status) if found is None else (format_value(*found), f"measured{_beside(run, found[0])}")
    ttft = number_of(run.measurement.get("ttft_s"))
    if ttft and found and found[0] != "ttft_s":
        line += f"; half of the first tokens within {format_seconds(ttft)}"
    return Card("Serving under load", number, line, _run_table(run))


def _server_card(run: Run) -> Card:
    found = _first(run, "startup_s", "peak_memory_bytes", "weights_bytes")
    if found is None:
        return Card("Server", "–", run.status, _run_table(run))
    words = {"startup_s": "from start to ready", "peak_memory_bytes": "at its peak", "weights_bytes": "of weights"}
    return Card("Server", format_value(*found), f"{words[found[0]]}{_beside(run, found[0])}", _run_table(run))


# -- the machine ----------------------------------------------------------------------------------------------------------


def _machine_card(runs: Sequence[Run]) -> Card | None:
    """The machine of the newest run. If it is not this machine, only its fingerprint is known."""
    if not runs:
        return None
    here = read_fingerprint()
    if runs[0].fingerprint != here.key:
        return Card("Machine", runs[0].fingerprint[:12], "the fingerprint of the machine that made the newest run")
    try:
        profile = load_profile()
    except TwostrokeError:
        profile = None
    name = ", ".join(here.gpus) or here.cpu_model
    line = f"{name}, {format_bytes(here.ram_bytes)}"
    return Card("Machine", f"{here.n_cores} cores", line, None if profile is None else _rates_table(profile))


def _rates_table(profile: MachineProfile) -> Table:
    rows: list[list[str]] = [["reading, by what is read again and again"]]
    rows += [[format_bytes(p.working_set_bytes), f"{p.bytes_per_s / 1e9:.3g} GB/s"] for p in profile.read_bandwidth]
    rows.append(["products, the best of 4096³ and of the models' shapes"])
    rows += [[name.replace("_", " "), format_flop_rate(rate)] for name, rate in profile.peak_flop_per_s.items()]
    rows.append(["starting work"])
    rows.append(["one operation", format_seconds(profile.op_launch_s)])
    rows.append(["one linear layer", format_seconds(profile.linear_launch_s)])
    rows.append(["disk", f"{format_bytes(profile.disk_write_bytes_per_s)}/s written"])
    note = f"Measured {profile.measured_at} by twostroke calibrate with {format_count(profile.n_threads)} threads."
    return Table("What this machine can do", ("", "measured"), rows, note)
