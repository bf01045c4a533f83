"""Notices that a machine will be taken away: a file, or the URL of a cloud's metadata, polled once a second."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from twostroke.cli.console import log
from twostroke.core.errors import InputError

POLL_S = 1.0
AWS = "http://169.254.169.254/"
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""Without which Google's and Azure's metadata do not answer."""

NONE = {"", "FALSE", "NONE"}


def check_notice(notice: str) -> None:
    """Raise InputError if ``notice`` is neither a path in an existing folder nor a URL of http."""
    if "://" in notice:
        if not notice.startswith(("http://", "https://")):
            raise InputError(f"--interruption-notice {notice} must be a path, or begin with http:// or https://.")
    elif not Path(notice).absolute().parent.is_dir():
        raise InputError(f"--interruption-notice {notice}: its folder does not exist, so no notice can come there.")


@contextlib.contextmanager
def watching(notice: str | None, stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` once as soon as ``notice`` has come, if there is one to watch."""
    if notice is None:
        yield
        return
    check_notice(notice)
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if has_come(notice):
                log(f"an interruption notice came at {notice}: a checkpoint is written, and the run ends.")
                stop()
                return
            over.wait(POLL_S)

    thread = threading.Thread(target=watch, name="notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def has_come(notice: str) -> bool:
    """Whether the file exists, or the URL answers with something else than nothing, FALSE, NONE or an empty list of events. One
    that does not answer is no notice."""
    if "://" not in notice:
        return Path(notice).exists()
    try:
        answer = _get(notice, HEADERS)
    except urllib.error.HTTPError as error:
        if error.code != 401 or not notice.startswith(AWS):
            return False
        try:
            token = _get(f"{AWS}latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
            answer = _get(notice, {"X-aws-ec2-metadata-token": token})
        except OSError:
            return False
    except (OSError, ValueError):
        return False
    return _says_so(answer)


def _says_so(answer: str) -> bool:
    with contextlib.suppress(ValueError):
        document = json.loads(answer)
        if isinstance(document, dict) and "Events" in document:  # Azure's
            return any(event.get("EventType") in ("Preempt", "Terminate") for event in document["Events"])
    return answer.strip().upper() not in NONE


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=POLL_S) as answer:
        return str(answer.read(1 << 16).decode(errors="replace"))
