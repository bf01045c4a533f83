"""Answers by a server over OpenAI's interface: ``twostroke serve``, or another one."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from twostroke.bench.http_stream import Address
from twostroke.cli.chat.conversation import NEXT_SPEAKER, Answer, Message, harmless
from twostroke.core.errors import CapacityError, ConfigError, EngineError, InputError, TwostrokeError
from twostroke.server.launch import is_loopback

CONNECT_S = 10.0
SILENCE_S = 600.0
"""Longest wait for the next piece of an answer, as OpenAI's own client waits."""
MAX_ANSWER_BYTES = 2**24
"""Of a list of models or of an error."""
MAX_LINE_BYTES = 2**22
"""Of one event of a stream."""
KEY_VARIABLE = "TWOSTROKE_API_KEY"
CUT = "the server ended in the middle of its answer."


class RemoteModel:
    """One model of the server at ``url``: ``name``, or the first that it lists. Raises ConfigError for a URL, a key or a name
    that cannot be, and EngineError if nothing answers there as such a server does."""

    stops_at_once = True  # closing the connection is all that stopping takes, and the next byte may be far off
    notes: tuple[str, ...] = ()

    def __init__(self, url: str, key: str, name: str) -> None:
        address = Address.parse(url)
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"{address.scheme}://{host}:{address.port}{address.path}"
        if " " in key or not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has characters that an HTTP header cannot carry. Look at where it comes from.")
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
                trust_env=not is_loopback(address.host),  # a proxy cannot reach what only this machine can
            )
        except (httpx.InvalidURL, ValueError, ImportError) as error:  # also of proxies that the environment names
            raise ConfigError(f"{self.url} cannot be asked: {error}.") from None
        try:
            listed = self._models()
            if name and name not in listed:
                raise ConfigError(harmless(f"{self.url} does not serve {name!r:.100}. Served: {', '.join(listed):.400}."))
        except BaseException:
            self.close()
            raise
        chosen = name or next(iter(listed))
        self.name = harmless(chosen)
        self._body = {"model": chosen, "stream": True, "stream_options": {"include_usage": True}}
        self.has_template = listed[chosen].get("chat_template") is not False  # other servers do not tell
        if not self.has_template:
            self._body["stop"] = [NEXT_SPEAKER]

    def _models(self) -> dict[str, dict[str, Any]]:
        """What the server lists, by name."""
        with self._answer("GET", "/v1/models") as answer:
            try:
                found = {str(model["id"]): dict(model) for model in json.loads(_whole(answer))["data"]}
            except (ValueError, TypeError, KeyError, RecursionError):
                found = {}
        if not found:
            raise EngineError(f"{self.url} answers, but not as an OpenAI-compatible server: /v1/models lists no model.")
        return found

    def pieces(
        self, messages: Sequence[Message], settings: Mapping[str, int | float], into: Answer
    ) -> Generator[str, None, None]:
        """Text as it comes; ``into`` grows with it. Raises CapacityError, InputError and EngineError with the server's
        sentence, or with ours if it has none."""
        began = time.perf_counter()
        with self._answer("POST", "/v1/chat/completions", {**self._body, "messages": [*messages], **settings}) as answer:
            for event in _events(answer):
                into.elapsed_s = time.perf_counter() - began
                piece = _take(event, into)
                if piece:
                    into.ttft_s = into.ttft_s or into.elapsed_s
                    into.text += piece
                    yield piece
        into.is_full = into.finish_reason == "length" and "max_tokens" not in settings

    @contextmanager
    def _answer(self, method: str, path: str, body: Any = None) -> Iterator[httpx.Response]:
        """The answer to a request, whose body is still to be read. Raises InputError and EngineError for anything but a 200,
        and for a connection that fails, then or later."""
        begun = False
        try:
            with self._client.stream(method, path, json=body) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer, self.url)
                begun = True
                yield answer
        except httpx.TimeoutException as error:
            limit_s = CONNECT_S if isinstance(error, httpx.ConnectTimeout) else SILENCE_S
            raise EngineError(f"{self.url} has sent nothing for {limit_s:g} s.") from None
        except httpx.HTTPError as error:
            if begun:
                raise EngineError(CUT) from None
            if isinstance(error, httpx.NetworkError):
                raise EngineError(
                    f"nothing answers at {self.url}: {error}. Start a server with `twostroke serve MODEL`, or look at the URL."
                ) from None
            raise EngineError(f"{self.url} does not answer as an HTTP server does: {error}.") from None

    def close(self) -> None:
        self._client.close()


def _whole(answer: httpx.Response) -> bytes:
    found = bytearray()
    for piece in answer.iter_bytes():
        found += piece
        if len(found) > MAX_ANSWER_BYTES:
            raise EngineError(f"the server's answer is over {MAX_ANSWER_BYTES} bytes.")
    return bytes(found)


def _refusal(answer: httpx.Response, url: str) -> TwostrokeError:
    """The error that an answer stands for whose status is not 200."""
    try:
        told = json.loads(_whole(answer))["error"]
        sentence, code = harmless(str(told["message"])), told.get("code")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sentence, code = f"{url} answered with status {answer.status_code}.", None
    if answer.status_code == 401:
        return ConfigError(f"{url} wants an API key that it knows. Give --api-key-file, or set {KEY_VARIABLE}.")
    if code == "context_length_exceeded":
        return CapacityError(sentence)
    return InputError(sentence) if answer.status_code in (400, 404, 413, 422) else EngineError(sentence)


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, in bounded memory. Raises EngineError if it ends without the last one."""
    rest = b""
    for piece in answer.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise EngineError(f"the server sent an event of over {MAX_LINE_BYTES} bytes.")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data) if data else None
            except (ValueError, RecursionError):
                raise EngineError("the server sent an event that is not JSON.") from None
            if isinstance(event, dict):
                yield event
    raise EngineError(CUT)


def _take(event: dict[str, Any], into: Answer) -> str:
    """The text that ``event`` adds to an answer; ``into`` gets its counts. Raises EngineError if it tells of an error, or has
    another form than OpenAI's."""
    if event.get("error"):
        told = event["error"]
        raise EngineError(harmless(str(told.get("message") if isinstance(told, dict) else told)))
    try:
        into.output_tokens = int((event.get("usage") or {}).get("completion_tokens", into.output_tokens))
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        into.finish_reason = choice.get("finish_reason") or into.finish_reason
        delta: dict[str, Any] = choice.get("delta") or {}
        reasoning, text = str(delta.get("reasoning_content") or ""), str(delta.get("content") or "")
        if reasoning and not into.reasons:
            reasoning, into.reasons = f"<think>\n{reasoning}", True
        if text and into.reasons:
            text, into.reasons = f"\n</think>\n\n{text}", False
        return reasoning + text
    except (TypeError, ValueError, AttributeError):
        raise EngineError("the server sent an event of another form than OpenAI's.") from None
