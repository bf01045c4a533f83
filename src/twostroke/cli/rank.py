"""A command that runs as one rank of several, which ``--ranks`` of ``train`` and ``eval`` or torchrun started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import log
from twostroke.core.errors import TwostrokeError

if TYPE_CHECKING:
    from twostroke.training.ranks import Ranks


def is_rank() -> bool:
    """Whether torchrun, or ``--ranks``, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def as_rank(remedy: str = "Continue with --resume.") -> Iterator[Ranks]:
    """In a group with the other ranks. An error is told by one of them, and the loss of a rank by the launcher if there is one,
    else with ``remedy``."""
    from twostroke.cli.rank_processes import LAUNCHED, LOST_CODE
    from twostroke.training.ranks import NotJoined, RankLost, joined

    try:
        with joined(remedy) as ranks:
            yield ranks
    except TwostrokeError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends all ranks as soon as one has ended
        if isinstance(error, RankLost | NotJoined) and LAUNCHED in os.environ:
            if isinstance(error, NotJoined):
                log(str(error))
            raise typer.Exit(LOST_CODE) from None
        if error.is_told:
            raise typer.Exit(error.exit_code) from None
        raise
