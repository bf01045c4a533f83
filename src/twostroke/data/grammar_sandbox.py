"""The process in which constraints of unknown people are compiled first: whether they can be, and how soon.

llguidance bounds the size of what it makes, and by that most of the time. Some short schemas take it minutes all the same
(``{"multipleOf": 999983}``), and its work cannot be interrupted, so it is done in a process with limits (``data.sandbox``).
``data.grammar_check.GrammarCheck`` is the other end. Each frame is the JSON list of a constraint's kind and text; the answer
has no text. It imports no torch.
"""

from __future__ import annotations

import json
import sys

from twostroke.data.grammars import byte_vocabulary, compiled
from twostroke.data.sandbox import Work, serve
from twostroke.scheduling.constraint import Constraint

COMPILE_S = 2.0
"""Wall-clock limit. Schemas in use take 1 to 30 ms."""


def main() -> int:
    vocabulary = byte_vocabulary()

    def check(frame: bytes) -> Work:
        def work() -> str:
            compiled(Constraint(*json.loads(frame)), vocabulary)
            return ""

        return work, COMPILE_S

    serve(check, check)
    return 0


if __name__ == "__main__":
    sys.exit(main())
