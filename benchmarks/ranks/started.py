"""What the benchmarks of ranks have in common: options, data that is prepared once, and ranks that are started and asked."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "network"))

from rank_processes import answers

from twostroke.core.data_recipe import DataRecipe
from twostroke.data.prepare import prepare


def asked(parser: argparse.ArgumentParser, as_rank: Callable[[Path, str], None]) -> argparse.Namespace:
    """The arguments, of which ``out`` must be given. A process that was started as a rank does ``as_rank(folder, name)`` and
    ends."""
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        as_rank(Path(arguments.as_rank[0]), arguments.as_rank[1])
        sys.exit(0)
    if arguments.out is None:
        parser.error("--out is missing")
    return arguments


@contextmanager
def home_with(data: DataRecipe) -> Iterator[Path]:
    """A home of Twostroke's, in which ``data`` is prepared, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        os.environ["TWOSTROKE_HOME"] = str(home)
        prepare(data)
        yield home


def said(home: Path, script: str, name: str, n: int, port: int, threads: int, own_cache: bool = False) -> list[str]:
    """The last line of each of ``n`` ranks of ``threads`` threads that ``script`` starts for the case ``name``, in a folder of
    their own; with ``own_cache`` their compiler begins with an empty cache."""
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        words = [sys.executable, script, "--as-rank", folder, name]
        more = {"TWOSTROKE_HOME": str(home), "OMP_NUM_THREADS": str(threads)}
        if own_cache:
            more["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "cache")
        return [answer.splitlines()[-1] for answer in answers(name, [words] * n, port, more)]
