"""A child process that reads damaged files: one line of JSON for each that ended in another way than it may.

``python worker.py FOLDER FIRST_SEED COUNT SUBJECT...``. FOLDER/current names subject and seed of the file being read, for the
parent to know after a crash. Each file may load, or raise a TwostrokeError with a sentence; beside that the bounds below hold.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from subjects import SUBJECTS

from twostroke.core.errors import TwostrokeError

MOST_CPU_S = 5.0  # a sound file of each kind takes a twentieth of a second; others use the cores too
MOST_SPARE_BYTES = 64 * 10**6  # beside twice the file's size
MOST_SENTENCE = 2000
ADDRESS_SPACE = 24 * 2**30  # torch maps much that it never touches; a reader that asks for this much ends in a MemoryError


def resident() -> tuple[int, int]:
    """Bytes of this process in memory now, and at most since the mark was reset."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024, int(status["VmHWM"].split()[0]) * 1024


def judge(name: str, seed: int, folder: Path, sound: Path, content: bytes) -> str | None:
    """What was wrong with how the damaged file was read; None where nothing was."""
    subject = SUBJECTS[name]
    damaged = subject.damage(content, random.Random(f"{name} {seed}"))
    sound.unlink()  # never written in place: an earlier reader may have mapped it
    sound.write_bytes(damaged)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    Path("/proc/self/clear_refs").write_text("5")
    before, _ = resident()
    began = time.process_time()
    wrong = None
    try:
        subject.read(folder)
    except TwostrokeError as error:
        if not 10 < len(str(error)) < MOST_SENTENCE:
            wrong = f"an error of {len(str(error))} characters: {str(error)[:200]}"
    except KeyboardInterrupt:
        raise
    except BaseException:
        wrong = traceback.format_exc(limit=-6)
    took = time.process_time() - began
    if wrong is None and took > MOST_CPU_S:
        wrong = f"took {took:.1f} s"
    _, peak = resident()
    if wrong is None and peak - before > 2 * size + MOST_SPARE_BYTES:
        wrong = f"took {(peak - before) / 1e6:.0f} MB for {size} bytes"
    return wrong


def main(root: Path, first: int, count: int, names: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    torch.set_num_threads(1)
    for name in names:
        folder = root / name
        folder.mkdir(parents=True)
        sound = SUBJECTS[name].make(folder)
        content = sound.read_bytes()
        SUBJECTS[name].read(folder)
        loaded = 0
        for seed in range(first, first + count):
            (root / "current").write_text(f"{name} {seed}")
            wrong = judge(name, seed, folder, sound, content)
            loaded += wrong is None
            if wrong is not None:
                print(json.dumps({"subject": name, "seed": seed, "wrong": wrong}), flush=True)
        shutil.rmtree(folder)
    (root / "current").write_text("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
