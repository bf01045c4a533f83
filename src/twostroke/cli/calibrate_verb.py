"""``twostroke calibrate`` measures this machine and stores its profile."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.core.contention import recently
from twostroke.core.described import plain
from twostroke.core.errors import TwostrokeError
from twostroke.core.parallel_recipe import MAX_LOCAL_RANKS
from twostroke.core.units import format_bytes, format_flop_rate, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.core.profile import MachineProfile
    from twostroke.core.rates import Conditions

app = typer.Typer(add_completion=False)

BUSY_SHARE = 0.5
"""If a greater share of the cores is busy, calibration says that its numbers will read low."""


WIDTH = 100
"""Columns of the text that is printed at the end."""

NATIVE = "native_"
"""Beginning of the names of the native engine's products."""

DISTURBED_SHARE = 0.1
"""If a greater share of the measurements found no quiet moment, calibration and `doctor` say so."""


@app.command()
def calibrate(
    device: str = typer.Option(
        None, help="Where training is measured: cpu or cuda. Default: cuda if there is a GPU. Serving runs on the CPU."
    ),
    ranks: int = typer.Option(
        0,
        min=0,
        max=MAX_LOCAL_RANKS,
        help="Processes between which collectives are measured; 0: one for each GPU, two on a CPU.",
    ),
    only: str = typer.Option(
        None, help="Measure only what serve or train needs (serve: about half the time) and keep the rest."
    ),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Measure this machine once and store its profile, which every plan for "this" uses.

    It takes 7 to 14 minutes on two cores, longest on processors with AVX2 alone.

    Each engine is measured on the device that it computes on: training on the GPU if there is one, serving on the CPU.

    Under torchrun, collectives between its ranks are measured as well, and the first rank does the rest.
    """
    from twostroke.calibration.collectives import is_launched, measure_in_launched_group
    from twostroke.calibration.measure import calibrate_engines, engines_by_device, pick_device
    from twostroke.core.profile import save_profile

    engines_by_device(device, only)  # what is wrong is told before the machine is looked at
    programs = recently()
    if programs.used > BUSY_SHARE * len(programs.processors):
        shown = f"{programs.used:.1f} of {len(programs.processors)}"
        log(f"other programs keep {shown} cores busy: rates will read low. Calibrate when the machine is idle.")
    if is_launched() and os.environ["RANK"] != "0":
        measure_in_launched_group(pick_device(device))
        return
    documents, texts, conditions, dropped = [], [], [], []
    with progress("calibrating", 1.0) as advance:
        for profile in calibrate_engines(advance, device=device, n_ranks=ranks, only=only):
            dropped.append(_dropped_text(profile.device))
            path = save_profile(profile)
            documents.append({**plain(profile), "path": str(path)})
            texts.append(_text(profile, path))
            conditions.append(profile.conditions)
    for text in filter(None, (*map(busy_text, conditions), *dropped)):
        log(text)
    *others, last = documents
    emit(last | ({"others": others} if others else {}), "\n\n".join(texts), as_json)


def busy_text(conditions: Conditions) -> str:
    """A sentence on how low a profile may read because other programs were busy; empty for a quiet machine."""
    share, low = conditions.disturbed_share, conditions.most_low_by_share
    if share <= DISTURBED_SHARE and low <= 0:
        return ""
    return (
        f"other programs were using the processors: {100 * share:.0f}% of the measurements found no quiet moment, and rates "
        f"may read {100 * low:.0f}% low on average. Plans widen their intervals by that. Calibrate again when it is idle."
    )


def _dropped_text(device: str) -> str:
    """What a calibration of ``device`` drops with the profile that it replaces; empty if it has nothing or is not readable."""
    from twostroke.core.profile import load_profile

    try:
        before = load_profile(device=device)
    except TwostrokeError:
        return ""
    if before is None or not before.corrections.learned:
        return ""
    return (
        f"the corrections of {before.corrections.fitted_at} are dropped with the constants that they corrected. "
        "`twostroke ledger fit` learns new ones from runs planned with this calibration."
    )


def _text(profile: MachineProfile, path: Path) -> str:
    from twostroke.planner.hardware.tables import WORK_OF

    f = profile.fingerprint
    reads = [f"{p.bytes_per_s / 1e9:.3g} GB/s of {format_bytes(p.working_set_bytes)}" for p in profile.read_bandwidth]
    rates = {name: format_flop_rate(rate) for name, rate in profile.peak_flop_per_s.items()}
    trained = [f"{name} {rate}" for name, rate in rates.items() if not name.startswith(NATIVE)]
    served = [
        f"{name.removeprefix(NATIVE).replace('_', ' ')} {rate}" for name, rate in rates.items() if name.startswith(NATIVE)
    ]
    name = f.cpu_model if profile.device == "cpu" else ", ".join(f.gpus) or profile.device
    engines = f"{' and '.join(WORK_OF[engine] for engine in profile.engines)} on {profile.device}"
    launch_s, linear_s = format_seconds(profile.op_launch_s), format_seconds(profile.linear_launch_s)
    rows = {
        "machine": f"{name}, {f.n_cores} cores, {format_bytes(f.ram_bytes)} (fingerprint {f.key})",
        "measured": engines,
        "reads": ", ".join(reads),
        "products": ", ".join(trained) + (" (torch, 4096³)" if trained else ""),
        "serving": ", ".join(served) + (" (best product of the native engine)" if served else ""),
        "launches": f"{launch_s} an operation, {linear_s} a linear layer",
        "ring": _ring(profile),
        "disk": f"{format_bytes(profile.disk_write_bytes_per_s)}/s written",
    }
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"{title:11}", subsequent_indent=" " * 11, break_on_hyphens=False)
        for title, text in rows.items()
        if text
    ]
    return "\n".join([*lines, f"{'profile':11}{path}"])


def _ring(profile: MachineProfile) -> str:
    """Start-up and rate of the measured collectives; empty for one rank."""
    found = [
        f"{where} {format_seconds(ring.alpha_s)} a message, {ring.bytes_per_s / 1e9:.3g} GB/s"
        for where, ring in (("link", profile.link), ("network", profile.network))
        if ring is not None
    ]
    return "; ".join(found)
