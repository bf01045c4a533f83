"""torch.cuda's warnings stay away from the command line and its processes; all others are shown."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WARN = (
    "import warnings\n"
    "def warn(module): warnings.warn_explicit(f'CUDA initialization in {module}', UserWarning, 'x.py', 1, module=module)\n"
    "warn('torch.cuda'); warn('elsewhere')\n"
)
"""As torch's own: the module is the one that the warning is attributed to."""

VERB = f"""
import subprocess, sys, types, typer
import twostroke.cli.main as main
app = typer.Typer()
@app.command()
def noisy():
    exec({WARN!r}, {{}})
    subprocess.run([sys.executable, "-c", {WARN!r}], check=True)
sys.modules["twostroke.cli.noisy_verb"] = types.SimpleNamespace(app=app)
main.VERBS["noisy"] = "Warns as torch does."
main.main(["noisy"])
"""


def errors(**variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | variables
    done = subprocess.run(
        [sys.executable, "-c", VERB], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_no_verb_and_no_process_of_one_shows_them() -> None:
    shown = errors()
    assert "in torch.cuda" not in shown
    assert shown.count("in elsewhere") == 2


@pytest.mark.parametrize("rule", ["always", "default"])
def test_a_user_who_asks_for_warnings_gets_them(rule: str) -> None:
    assert errors(PYTHONWARNINGS=rule).count("in torch.cuda") == 2
