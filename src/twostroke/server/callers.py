"""Who sends a request, and how long its client waits for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.server.keys import Account

READ_TIMEOUT = b"x-stainless-read-timeout"
"""Header in which OpenAI's and Anthropic's clients say after how many seconds without a byte they give up."""
CALLER = "twostroke.caller"
"""Name in a request's scope of its ``Caller``."""
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass
class Visit:
    """What a request is given on its way: what ``holds`` end with it, and of an A/B test the ``arm``, the model that answers,
    and the ``unit``, the client's name in it."""

    holds: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    arm: str | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Caller:
    """``name``: under which its requests take turns. ``account``: of its key, if it sent one. ``read_timeout_s``: after which
    its client gives up if nothing comes; ``came_s``: when the headers were read. Requests of a batch are not ``limited``: they
    are behind all others, and wait. ``traceparent``: the trace that it is part of, as W3C's header has it. ``visit``: of a
    request to a server of several models."""

    name: str = ""
    account: Account | None = None
    read_timeout_s: float | None = None
    limited: bool = True
    came_s: float | None = None
    traceparent: str | None = None
    visit: Visit | None = None


NOBODY = Caller()


def read_timeout_of(headers: Mapping[bytes, bytes]) -> float | None:
    """Seconds that the client waits for a byte, if it says so. What is not a number above 0 says nothing."""
    given = headers.get(READ_TIMEOUT, b"").strip()
    return (float(given) or None) if _SECONDS.fullmatch(given) else None
