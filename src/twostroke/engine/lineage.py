"""``Lineage``: which weights an engine began with, which it has now, and the names that follow from them."""

from __future__ import annotations

from pathlib import Path

from twostroke.engine.packed_cache import states_of_files
from twostroke.engine.tiers.identity import weight_files, weights_digest
from twostroke.engine.weights import Prepared, key_of


class Lineage:
    """``digest`` is that of the present weights' files in ``directory``, None until they were looked at, and ``identity`` that
    of the keys and values they give. Make it before the weights are read: files that change later are noticed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.digest: str | None = None
        self.identity: bytes | None = None
        self._first_digest: str | None = None  # of the weights that the engine began with
        self._first_states = _states(directory)

    def look(self) -> str:
        """The digest of the weights that the engine began with, read from ``directory``."""
        self._first_digest = self.digest = weights_digest(self.directory)
        return self.digest

    def look_unless_changed(self) -> None:
        """Look if nobody has, and if the files are still those that the engine has read."""
        if self._first_digest is None and self._first_states and _states(self.directory) == self._first_states:
            self.look()

    def key_of(self, prepared: Prepared) -> bytes:
        """The name of weights in the keys of their pages: empty for those that the engine began with."""
        return b"" if prepared.digest == self._first_digest else key_of(prepared.digest)

    def take(self, prepared: Prepared) -> None:
        """``prepared`` are the present weights from now on."""
        self.directory, self.digest, self.identity = prepared.directory, prepared.digest, prepared.identity


def _states(directory: Path) -> list[str]:
    """What changes with the weights of ``directory``; empty if they cannot be looked at."""
    try:
        return states_of_files(weight_files(directory))
    except OSError:
        return []
