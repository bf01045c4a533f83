"""A browser draws every plot of the report and has nothing to complain about."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.report.test_page import ledger_with_runs

from twostroke.report.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom",
)  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_a_browser_draws_every_plot_and_reports_no_error(tmp_path: Path) -> None:
    page = write_report(tmp_path / "r.html", ledger_with_runs(tmp_path))
    assert BROWSER is not None
    command = [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    html = done.stdout
    n_plots = html.count("<section")
    assert n_plots >= 5
    assert len(re.findall(r'class="plotly-graph-div js-plotly-plot"', html)) == n_plots  # Plotly's mark of a drawn plot
    errors = [line for line in done.stderr.split("\n") if "CONSOLE" in line and ("rror" in line or "Uncaught" in line)]
    assert errors == []
