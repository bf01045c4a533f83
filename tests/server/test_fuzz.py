"""Random requests, most of them nonsense: every answer is a 200 or a 4xx, none takes long, and the server lives on."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import httpx
import pytest
from serving import Served

from twostroke.server import embeddings_api, messages_api, protocol, responses_api, tokens_api

HELLO: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "the fox"}]}
APIS = (tokens_api, embeddings_api, messages_api, responses_api)
KINDS: dict[str, Any] = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatRequest,
    "/v1/score": protocol.ScoreRequest,
} | {path: kind for api in APIS for path, (_, kind) in api.ROUTES.items()}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "echo", "max_tokens": 3, "prompt": "the fox"},
    "/v1/chat/completions": HELLO | {"max_tokens": 3},
    "/v1/score": {"model": "echo", "text": "the fox"},
    "/tokenize": HELLO,
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/embeddings": {"model": "echo", "input": ["the", "fox"]},
    "/v1/messages": HELLO | {"max_tokens": 3},
    "/v1/messages/count_tokens": HELLO,
    "/v1/responses": {"model": "echo", "input": HELLO["messages"], "max_output_tokens": 3},
}
NEUTRAL = (protocol.NEUTRAL, tokens_api.NEUTRAL, messages_api.NEUTRAL, responses_api.NEUTRAL)
FIELDS = sorted({name for kind in KINDS.values() for name in kind.__struct_fields__}.union(*NEUTRAL))
ROUTES = tuple(KINDS)


def any_value(rng: random.Random, depth: int = 0) -> Any:
    leaves = [None, True, False, 0, 1, -1, 7, 10**30, -(2**63), 0.5, 1e308, "", "the fox", "\x00", "\ud800", "é" * 50, "echo"]
    kind = rng.randrange(4 if depth < 2 else 2)
    if kind < 2:
        return rng.choice(leaves)
    if kind == 2:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = ["role", "content", "type", "text", "include_usage", "x"]
    return {rng.choice(names): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def any_body(rng: random.Random, route: str) -> bytes:
    """A valid request with some fields replaced, most of them its route's, then perhaps some bytes."""
    body = dict(BODIES[route])
    for _ in range(rng.randrange(4)):
        body[rng.choice(FIELDS if rng.random() < 0.3 else KINDS[route].__struct_fields__)] = any_value(rng)
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.2:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


def fuzz(served: Served, n: int, seed: int) -> dict[int, int]:
    """Answers by status. Rejections must be quick."""
    rng = random.Random(seed)
    counts: dict[int, int] = {}
    slow: list[float] = []
    with httpx.Client(base_url=served.url, timeout=20, trust_env=False) as web:
        for _ in range(n):
            route = rng.choice(ROUTES)
            start = time.perf_counter()
            body = any_body(rng, route)
            response = web.post(route, content=body, headers={"content-type": "application/json"})
            took = time.perf_counter() - start
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
            assert response.status_code == 200 or 400 <= response.status_code < 500, body
            if response.status_code != 200:
                assert response.json()["error"]["message"]
                slow.append(took)
        assert web.get("/ready").status_code == 200
    # Rejections take a few milliseconds; the bound leaves room for a machine that others use.
    assert sorted(slow)[int(0.99 * len(slow))] < 0.1
    return counts


@pytest.mark.alone
def test_nonsense_is_answered_and_survived(echo: Served) -> None:
    counts = fuzz(echo, 400, seed=1)
    assert min(counts.get(200, 0), counts.get(400, 0)) > 40, "both kinds are exercised"


@pytest.mark.soak
def test_much_nonsense_is_answered_and_survived(echo: Served) -> None:
    fuzz(echo, 10_000, seed=2)
