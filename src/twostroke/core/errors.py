"""Every error that Twostroke raises on purpose.

::

    TwostrokeError                  exit 1: the work failed, and the sentence says why
    ├── InputError                  exit 2 / HTTP 400: something the caller gave is wrong; nothing was started
    │   ├── ConfigError             a config.json, recipe, profile or option breaks a rule
    │   │   ├── UnsupportedFamilyError   a model family that has no definition here
    │   │   └── NotCalibratedError       a plan for this machine, which has no profile that holds
    │   ├── DataError               a corpus, tokenizer or shard is missing, empty or unreadable
    │   ├── CorruptFileError        a weight, checkpoint, ledger or shard file does not hold what its header or hash promises
    │   └── CapacityError           the request cannot fit in the memory, context or budget there is
    ├── EngineError                 the engine process died, timed out or refused
    └── Interrupted                 exit 75: stopped by a signal after a checkpoint was written

An error's text is one or two sentences: what, the value, the rule, the remedy, as in
``tensor_parallel=3 must divide n_kv_heads=8. Use 1, 2, 4 or 8.``
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TwostrokeError(Exception):
    """Root of every deliberate error. The command line exits with ``exit_code``. ``is_told``: a child process has printed the
    sentence already, on the stderr that it shares with this process."""

    exit_code = 1
    is_told = False


class InputError(TwostrokeError):
    """``field`` names what of a request is wrong, where one field is: an HTTP answer's ``param``."""

    exit_code = 2

    def __init__(self, sentence: str = "", *, field: str | None = None) -> None:
        super().__init__(sentence)
        self.field = field


class ConfigError(InputError):
    pass


class UnsupportedFamilyError(ConfigError):
    pass


class NotCalibratedError(ConfigError):
    pass


class DataError(InputError):
    pass


class CorruptFileError(InputError):
    pass


class CapacityError(InputError):
    pass


class EngineError(TwostrokeError):
    pass


class Interrupted(TwostrokeError):
    exit_code = 75


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A closing clause for an unknown name: ``Did you mean 'learning_rate'?`` or the list of what is known."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
