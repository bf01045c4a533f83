"""The load generator against servers whose every answer is known."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Script, scripted

from twostroke.bench.definitions import Slo
from twostroke.bench.http_stream import Address, Answer
from twostroke.bench.load import plan_requests, read_stream, run_load
from twostroke.bench.load_spec import LoadSpec
from twostroke.core.described import plain
from twostroke.core.errors import ConfigError, TwostrokeError


def spec(**changes: Any) -> LoadSpec:
    return LoadSpec(**{"n_requests": 6, "users": 2, "output_tokens": (4, 4), "warmup_requests": 1, "timeout_s": 5.0} | changes)


def test_times_of_a_known_stream_are_measured() -> None:
    with scripted(Script(first_s=0.1, gap_s=0.05)) as url:
        result = run_load(url, spec(), slo=Slo(ttft_s=2.0))
    s = result.summary
    assert (s.n_completed, s.failures, s.peak_concurrency) == (6, {}, 2)
    assert (s.prompt_tokens, s.output_tokens, s.slo_met) == (42, 24, 6)
    # A sleep never ends early; how late it ends depends on the machine, so the upper bounds are generous.
    assert 0.1 <= s.ttft_s.median < 0.6
    assert 0.05 <= s.tpot_s.median < 0.3
    assert s.itl_s.n == 6 * 3
    assert s.e2e_s.median >= 0.25
    assert s.duration_s >= 3 * 0.25


def test_the_empty_role_chunk_of_a_chat_is_not_the_first_token() -> None:
    with scripted(script := Script(first_s=0.2)) as url:
        result = run_load(url, spec(endpoint="chat", n_requests=2))
    assert result.summary.ttft_s.median >= 0.2
    assert "messages" in script.bodies[0]


def test_every_request_has_the_headers_and_fields_that_are_asked_for() -> None:
    with scripted(script := Script()) as url:
        run_load(url, spec(n_requests=2, more_headers={"x-stainless-read-timeout": "0.5"}, more_fields={"top_k": 3}))
    assert all(b"x-stainless-read-timeout: 0.5\r\n" in head for head in script.heads)
    assert [body["top_k"] for body in script.bodies] == [3] * 3


def test_warmup_requests_are_sent_and_not_counted() -> None:
    with scripted(script := Script()) as url:
        result = run_load(url, spec(warmup_requests=3))
    assert len(script.bodies) == 9
    assert [r.index for r in result.records] == list(range(6))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(statuses=[200, 429, 429]), "http 429"),
        (Script(cut_after=2), "connection closed early"),
        (Script(error_after=2), "stream error"),
        (Script(first_s=10.0), "timeout"),
    ],
)
def test_failures_are_counted_by_reason(script: Script, reason: str) -> None:
    with scripted(script) as url:
        result = run_load(url, spec(n_requests=2, timeout_s=0.5))
    assert result.summary.failures == {reason: 2}
    assert result.summary.n_completed == 0


def test_a_server_that_is_not_there_is_an_error() -> None:
    with scripted(Script()) as url:
        pass
    with pytest.raises(TwostrokeError, match="does not answer: connection refused"):
        run_load(url, spec())


def test_without_a_usage_record_chunks_are_counted() -> None:
    with scripted(Script(usage=False)) as url:
        assert run_load(url, spec()).summary.output_tokens == 24


def test_a_concurrency_cap_holds_requests_back_and_their_latency_counts_the_wait() -> None:
    with scripted(script := Script(first_s=0.1)) as url:
        load = spec(users=None, request_rate=math.inf, max_concurrency=2, warmup_requests=0, output_tokens=(1, 1))
        s = run_load(url, load).summary
    assert script.most_at_once == s.peak_concurrency == 2
    # Six requests wanted at once, two at a time, 0.1 s each: the last pair waits for two others.
    assert s.send_delay_s.p99 >= 0.2
    assert s.ttft_s.p99 >= 0.3


def test_a_closed_loop_never_has_more_than_its_users_in_flight() -> None:
    with scripted(script := Script(first_s=0.02)) as url:
        run_load(url, spec(users=3, n_requests=12, warmup_requests=0))
    assert script.most_at_once == 3


def test_open_loop_requests_are_sent_when_they_are_due() -> None:
    with scripted(Script()) as url:
        result = run_load(url, spec(users=None, request_rate=40.0, n_requests=20))
    planned = [p.at_s for p in plan_requests(result.spec)[1:]]
    assert [r.scheduled_s for r in result.records] == pytest.approx(planned, abs=1e-6)  # the same sums, shifted by the start
    assert all(r.sent_s >= r.scheduled_s - 1e-3 for r in result.records)  # the event loop's clock may tick a hair early


def test_a_plan_is_a_function_of_its_seed() -> None:
    load = LoadSpec(n_requests=20, request_rate=5.0, prompt_tokens=(1, 50), output_tokens=(1, 50), seed=3)
    assert plan_requests(load) == plan_requests(load)
    other = LoadSpec(n_requests=20, request_rate=5.0, prompt_tokens=(1, 50), output_tokens=(1, 50), seed=4)
    assert [p.text for p in plan_requests(load)] != [p.text for p in plan_requests(other)]


def test_runs_of_one_seed_have_the_same_arrivals_and_lengths_and_other_words() -> None:
    """A server's prefix cache must not know the prompts of the last run."""
    with scripted(script := Script()) as url:
        first, second = (run_load(url, spec(output_tokens=(1, 9), warmup_requests=0)) for _ in range(2))
        for _ in range(2):
            run_load(url, spec(output_tokens=(1, 9), warmup_requests=0, same_prompts=True))
    assert [r.output_tokens for r in first.records] == [r.output_tokens for r in second.records]
    prompts = [body["prompt"] for body in script.bodies]
    assert not set(prompts[:6]) & set(prompts[6:12])
    assert set(prompts[12:18]) == set(prompts[18:])


def test_later_turns_hold_all_that_was_said_and_wait_for_the_answer() -> None:
    for endpoint in ("completions", "chat"):
        with scripted(script := Script(first_s=0.02)) as url:
            load = spec(
                users=2, n_requests=6, turns=3, think_s=0.05, endpoint=endpoint, warmup_requests=0, output_tokens=(2, 2)
            )
            result = run_load(url, load)
        assert (result.summary.n_completed, script.most_at_once) == (6, 2)
        if endpoint == "chat":
            longest = max(script.bodies, key=lambda body: len(body["messages"]))["messages"]
            assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
            assert longest[1]["content"] == "xx"
        else:
            whole = max((body["prompt"] for body in script.bodies), key=len)
            starts = [body["prompt"] for body in script.bodies if whole.startswith(body["prompt"])]
            assert len(starts) == 3
            assert whole.startswith(min(starts, key=len) + "xx ")
        for i in (1, 2, 4, 5):
            before, turn = result.records[i - 1], result.records[i]
            assert turn.scheduled_s >= before.chunk_times_s[-1] + 0.05 - 1e-9


def test_turns_after_a_failed_one_are_not_sent() -> None:
    with scripted(script := Script(statuses=[200, 500])) as url:
        load = spec(users=1, n_requests=3, turns=3, warmup_requests=0)
        result = run_load(url, load)
    assert len(script.bodies) == 2
    assert result.summary.failures == {"http 500": 1, "the turn before failed": 1}


def test_prompts_that_share_blocks_begin_alike() -> None:
    shared = spec(n_requests=4, prompt_tokens=(40, 60), shared_prefix=32, warmup_requests=1)
    warm, *texts = [request.text.split() for request in plan_requests(shared)]
    assert all(text[:24] == texts[0][:24] for text in texts)
    assert warm[:24] != texts[0][:24]
    assert len({tuple(text[24:]) for text in texts}) == 4


def test_a_trace_is_sent_as_recorded(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 + 40 * i, "input_length": 600 + i, "output_length": 2 + i, "hash_ids": [7, i]} for i in range(4)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = LoadSpec(trace=str(file), n_requests=3, warmup_requests=0, speed=2.0, length_scale=0.125)
    first, second, third = plan_requests(load)
    assert [p.at_s for p in (first, second, third)] == pytest.approx([0.0, 0.02, 0.04])
    assert (first.text.split()[:48], len(first.text.split())) == (second.text.split()[:48], 56)  # 75 of 600 tokens
    assert first.text.split()[48:] != second.text.split()[48:]
    with scripted(Script()) as url:
        result = run_load(url, load)
    assert [record.scheduled_s for record in result.records] == pytest.approx([0.0, 0.02, 0.04], abs=1e-6)


def test_a_late_load_generator_refuses_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def slept(at: float) -> Any:
        return asyncio.sleep(max(0.0, at - time.perf_counter()) + 0.05)

    load = spec(users=None, request_rate=100.0, n_requests=5, output_tokens=(1, 1))
    with scripted(Script(first_s=1.0)) as url:
        monkeypatch.setattr("twostroke.bench.load._sleep_until", slept)
        late = run_load(url, load)
        closed = run_load(url, spec(n_requests=2, output_tokens=(1, 1)))
    assert late.refusal is not None
    assert "p99 start delay" in late.refusal
    assert late.summary.start_delay_s.median >= 0.05
    assert late.summary.ttft_s.median >= late.summary.ttft_from_sent_s.median + 0.05
    assert closed.refusal is None  # it has no schedule


def test_waiting_for_a_place_is_not_the_generators_lateness() -> None:
    with scripted(Script(first_s=0.2)) as url:
        load = spec(users=None, request_rate=math.inf, max_concurrency=2, warmup_requests=0, output_tokens=(1, 1))
        s = run_load(url, load).summary
    assert s.send_delay_s.p99 >= 0.4
    assert s.start_delay_s.p99 < 0.2


def test_lengths_stay_within_their_bounds() -> None:
    planned = plan_requests(LoadSpec(n_requests=200, users=1, output_tokens=(3, 9)))
    lengths = {p.max_tokens for p in planned}
    assert lengths == set(range(3, 10))


def test_raw_times_are_kept(tmp_path: Path) -> None:
    with scripted(Script()) as url:
        result = run_load(url, spec())
    file = tmp_path / "raw.jsonl"
    result.write_raw(file)
    head, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert head["model"] == "scripted"
    assert head["load"]["users"] == 2
    assert [tuple(line["chunk_times_s"]) for line in lines] == [r.chunk_times_s for r in result.records]


def test_a_report_says_each_formula_beside_its_number() -> None:
    with scripted(Script()) as url:
        text = run_load(url, spec(), slo=Slo(ttft_s=5)).text()
    for phrase in (
        "first non-empty chunk − scheduled",
        "(E2E − TTFT) / (output tokens − 1)",
        "pooled",
        "6 of 6",
        "SLO",
        "last non-empty chunk − sent",
        "own lateness",
    ):
        assert phrase in text


def test_a_result_is_one_json_document() -> None:
    with scripted(Script()) as url:
        document = plain(run_load(url, spec(users=None, request_rate=math.inf)))
    assert json.loads(json.dumps(document, allow_nan=False))["load"]["request_rate"] == "inf"


@pytest.mark.parametrize(
    "changes",
    [
        {"users": None},
        {"request_rate": 5.0},
        {"users": 0},
        {"n_requests": 0},
        {"users": None, "request_rate": -1.0},
        {"users": None, "request_rate": math.nan},
        {"arrivals": "bursts"},
        {"users": None, "request_rate": 2.0, "arrivals": "gamma:0"},
        {"arrivals": "constant"},  # a closed loop has none
        {"turns": 0},
        {"think_s": -1.0},
        {"prompt_tokens": "lognormal:0,1"},
        {"users": None, "trace": "t.jsonl", "output_tokens": (64, 64), "shared_prefix": 5},
        {"users": None, "request_rate": 2.0, "speed": 2.0},
        {"max_concurrency": 3},
        {"prompt_tokens": (0, 5)},
        {"output_tokens": (6, 5)},
        {"warmup_requests": -1},
        {"timeout_s": math.inf},
    ],
)
def test_a_load_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        spec(**changes)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x:8000?a=b"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Address.parse(url)


def test_an_address_may_end_in_v1() -> None:
    assert Address.parse("http://h:1/v1") == Address.parse("http://h:1/") == Address("http", "h", 1, "")
    assert Address.parse("https://h/api/v1") == Address("https", "h", 443, "/api")


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def test_an_event_counts_when_its_last_byte_has_arrived() -> None:
    data = event("a") + event("") + event("b") + b"data: [DONE]\n\n"
    answer = Answer(200, {}, [(float(i), data[i : i + 1]) for i in range(len(data))])
    times, *_, error = read_stream(answer)
    first, last = len(event("a")) - 1, len(event("a") + event("") + event("b")) - 1
    assert (times, error) == ([float(first), float(last)], None)


def test_a_stream_without_its_end_is_an_error() -> None:
    *_, error = read_stream(Answer(200, {}, [(0.0, event("a"))]))
    assert error == "truncated stream"


def test_a_chunk_that_is_no_json_is_an_error() -> None:
    *_, error = read_stream(Answer(200, {}, [(0.0, b"data: {\n\n")]))
    assert error == "unreadable chunk"
