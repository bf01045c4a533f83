from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from twostroke.cli.main import main


def test_a_folder_without_a_run_is_a_sentence_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["watch", str(tmp_path)])
    assert exit_.value.code == 2
    assert "is not a run" in capsys.readouterr().err


def test_it_serves_a_runs_page_without_torch_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps({"method": "pretrain", "train": {}, "resolved": {"steps": 5}}))
    code = (
        "import signal, sys\nfrom twostroke.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        f"try: main(['watch', {str(tmp_path)!r}, '--port', '0', '--json'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {}
    ) as child:
        assert child.stdout is not None
        document = ""
        while not document.endswith("}\n"):
            document += child.stdout.readline()
        with urllib.request.urlopen(json.loads(document)["url"] + "state", timeout=20) as answer:
            assert json.load(answer)["run"]["steps"] == 5
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
    assert child.returncode == 0
    assert err.split()[-1] == "False"
    assert "Traceback" not in err
