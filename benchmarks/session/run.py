"""Run the README's session as a person would type it and keep what it printed.

    python benchmarks/session/run.py --out benchmarks/session/runs/<date>-<machine>-<commit>

``session.json`` holds of each command its whole output and the lines that README.md shows; ``python docs/generate.py`` puts
those of the newest run there. Run it on a machine that does nothing else: three minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "benchmarks"), str(ROOT / "src")]

import recorded  # noqa: E402
from commands import SESSION  # noqa: E402

WIDTH = 100


def shortened(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 2].rstrip() + " …"


def shown(keep: str, lines: list[str]) -> list[str]:
    """Those of ``lines`` that begin as ``keep`` says, each once."""
    return list(dict.fromkeys(shortened(line) for line in lines if re.match(keep, line)))


def one(command: str, keep: str, work: Path, environment: dict[str, str]) -> dict[str, object]:
    """What ``command`` printed on stdout, and which lines of it are shown, each once."""
    arguments = [sys.executable, "-m", "twostroke", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command} exited with {done.returncode}:\n{done.stderr}")
    lines = recorded.without_folders(done.stdout).splitlines()
    return {"command": command, "shown": shown(keep, lines), "stdout": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, help="keep the session's HTML report here, for docs/picture.py")
    out = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(ROOT / "recipes", work / "recipes")
        environment = os.environ | {"TWOSTROKE_HOME": str(work / "home"), "PYTHONPATH": str(ROOT / "src")}
        steps = [one(command, keep, work, environment) for command, keep in SESSION]
        if out.report is not None:
            shutil.copyfile(work / "runs" / "report.html", out.report)
    from twostroke.core.profile import read_fingerprint
    from twostroke.ledger.code_version import code_version

    here = read_fingerprint()
    record = {
        "command": recorded.command(),
        "machine": f"{here.n_cores} cores of {here.cpu_model}, {datetime.now(UTC):%Y-%m-%d}",
        "code": code_version(),
        "python": platform.python_version(),
        "load_before": load,
        "steps": steps,
    }
    recorded.write(out.out, {"session.json": record})


if __name__ == "__main__":
    main()
