"""``POST /v1/score``, and one number in both phases: evaluation, the route and generated answers agree to the bit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from serving import serve_command

from real_model import make_model
from twostroke.cli.main import main
from twostroke.data.tokenizer import load_tokenizer
from twostroke.evaluation.encoding import Encoder
from twostroke.evaluation.engine_scorer import EngineScorer
from twostroke.kernels.native_library import library, why_absent
from twostroke.server.answers import ScoreAnswer
from twostroke.server.errors import ApiError
from twostroke.server.wire import TokenLogprobs

CONTEXT, TEXTS = "def add_argument(self, ", ["*args, **kwargs):\n    ", "name):", " prefix_chars='-'"]


def test_token_ids_are_scored_from_the_end_of_their_prompt_on(web: httpx.Client) -> None:
    body = {"model": "echo", "prompt": [33, 34, 35], "text": [[36, 0], [37]]}
    answer = web.post("/v1/score", json=body).json()
    assert web.post("/score", json=body).json()["data"] == answer["data"], "the route's other name"
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "echo", "score-")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (
        9,
        0,
        9,
    )
    # The echo engine gives place i of a prompt ln p = 0.5 − i, and its most probable token is 0.
    first = {"token_ids": [36, 0], "tokens": ["D", "<|endoftext|>"], "token_logprobs": [-2.5, -3.5]}
    assert answer["data"][0] == {"index": 0, "object": "score", "score": -6.0, "is_greedy": False, **first}
    assert answer["data"][1]["token_logprobs"] == [-2.5]
    alone = web.post("/v1/score", json={"model": "echo", "text": [33, 0]}).json()["data"]
    assert alone[0]["token_ids"] == [0], "nothing predicts the first"
    assert alone[0]["is_greedy"]
    nothing = web.post("/v1/score", json={"model": "echo", "text": [33]}).json()["data"][0]
    assert (nothing["score"], nothing["token_ids"]) == (0.0, [])


def test_scores_that_did_not_come_in_time_are_an_error() -> None:
    """What the engine had scored when ``timeout_s`` was over is no answer."""
    choice = SimpleNamespace(index=0, prompt=SimpleNamespace(ids=[1, 2, 3], first=1), scores=[TokenLogprobs(-1.0, [])])
    service: Any = SimpleNamespace(text=None, building=None)
    generation: Any = SimpleNamespace(choices=[choice])
    with pytest.raises(ApiError, match="within timeout_s") as refused:
        asyncio.run(ScoreAnswer(service, generation).whole([[]]))
    assert (refused.value.status, refused.value.param) == (408, "timeout_s")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "text", "text is missing."),
        ({"text": None}, "text", "text is not valid"),
        ({"text": ""}, "text", "text holds nothing to score."),
        ({"text": ["a", ""]}, "text", "text holds nothing to score."),
        ({"text": []}, "text", "text is an empty list."),
        ({"text": [[1], []]}, "text", "text holds an empty list of token ids."),
        ({"text": [1, "a"]}, "text", "text must be a text, a list of texts"),
        ({"text": ["a"] * 65}, "text", "text holds 65 texts; at most 64 may share a request."),
        ({"text": [300]}, "text", "text holds token id 300; ids are from 0 to 299."),
        ({"text": [1], "prompt": [300]}, "text", "token id 300"),
        ({"text": ["a", "b", "c"], "prompt": ["a", "b"]}, "prompt", "2 prompts for 3 texts. Give one for all, or one"),
        ({"text": ["a"], "prompt": [1, 2]}, "prompt", "prompt and text must both be texts, or both token ids."),
        ({"text": [1], "prompt": "a"}, "prompt", "prompt and text must both be texts, or both token ids."),
        ({"text": "fox " * 50_000}, "text", "context is 4096 tokens; the text has at least"),
        ({"text": [[5] * 3000] * 2, "prompt": [5] * 2000}, "text", "context is 4096 tokens; the text has 5000"),
        ({"text": ["fox"] * 64, "prompt": "a" * 40_000}, "text", "at most 2097152 may share a request."),
        ({"text": "\ud800"}, None, "half of a surrogate pair"),
        ({"text": "a", "max_tokens": 3}, "max_tokens", "max_tokens is not a known field."),
        ({"text": "a", "temperature": 0}, "temperature", "is not a known field."),
        ({"text": "a", "model": "other"}, "model", "model 'other' is not served here."),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_said(web: httpx.Client, body: dict[str, Any], param: str | None, says: str) -> None:
    response = web.post("/v1/score", content=json.dumps({"model": "echo"} | body), headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == (404 if "model" in body else 400)
    assert says in error["message"], error
    assert param in (None, error["param"])


def test_the_route_is_described(web: httpx.Client) -> None:
    paths = web.get("/openapi.json").json()["paths"]
    schema = paths["/v1/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["model", "text"]
    assert "allOf" not in schema


@contextlib.contextmanager
def serving(model: Path, home: Path, *options: str) -> Iterator[httpx.AsyncClient]:
    with serve_command(model, home, *options) as (_, url):
        yield httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)


@pytest.mark.skipif(library() is None, reason=why_absent())
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_what_is_generated_served_scored_and_evaluated_is_one_number(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "tiny")
    tokenizer, name = load_tokenizer(model), "tiny"

    async def scenario(web: httpx.AsyncClient) -> tuple[list[Any], Any]:
        async def one(seed: int) -> Any:
            asked = {"prompt": CONTEXT * (1 + seed % 3), "max_tokens": 12, "seed": seed, "ignore_eos": True, "logprobs": 0}
            echoed = {"echo": True} if seed % 2 else {}
            response = await web.post("/v1/completions", json={"model": name, **asked, **echoed})
            return response.json()["choices"][0]

        choices = await asyncio.gather(*(one(seed) for seed in range(8)))
        scores = (await web.post("/v1/score", json={"model": name, "prompt": CONTEXT, "text": TEXTS})).json()
        return choices, scores["data"]

    async def run(web: httpx.AsyncClient) -> tuple[list[Any], Any]:
        async with web:
            return await scenario(web)

    with serving(model, tmp_path, "--dtype", dtype, "--deterministic") as web:
        choices, data = asyncio.run(run(web))
    scorer = EngineScorer.load(model, dtype, deterministic=True, n_threads=1)
    known = {tokenizer.decode([i]): i for i in range(tokenizer.get_vocab_size())}
    for seed, choice in enumerate(choices):
        prompt = tokenizer.encode(CONTEXT * (1 + seed % 3)).ids
        found = choice["logprobs"]["token_logprobs"]
        told = choice["logprobs"]["tokens"]
        if any(token not in known for token in told):
            continue  # part of a character has no text of its own to find its id by
        own = [known[token] for token in told]
        ids, first = (own, 1) if seed % 2 else (prompt + own, len(prompt))
        ((nats, _),) = scorer.token_scores([(ids, first)])
        assert (-nats).tolist() == found[seed % 2 :]
    encoder = Encoder(scorer)
    for text, score in zip(TEXTS, data, strict=True):
        pair = encoder.pair(CONTEXT, text)
        ((nats, greedy),) = scorer.token_scores([(pair.ids, pair.first)])
        assert score["token_logprobs"] == (-nats).tolist()
        assert (score["token_ids"], score["is_greedy"]) == (pair.ids[pair.first :], bool(greedy.all()))
        assert score["score"] == math.fsum(score["token_logprobs"])
    options = [word for text in TEXTS for word in ("--text", text)]
    with pytest.raises(SystemExit) as caught:
        main(["score", str(model), "--prompt", CONTEXT, *options, "--dtype", dtype, "--json"])
    out, err = capsys.readouterr()
    assert not caught.value.code, err
    for score, printed in zip(data, json.loads(out)["scores"], strict=True):
        assert {k: printed[k] for k in ("score", "is_greedy", "token_ids", "token_logprobs")} == {
            k: score[k] for k in ("score", "is_greedy", "token_ids", "token_logprobs")
        }
