"""Beam search through the engine: what it is combined with, and what must not change its answers."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import models as lora_models

from real_model import make_model
from small_models import saved, transformers_model
from twostroke.core.errors import CapacityError, DataError, InputError
from twostroke.data.tokenizer import load_tokenizer
from twostroke.engine.beam_outputs import BeamSearchParams
from twostroke.engine.events import EVENT_ENTRIES
from twostroke.engine.llm import LLM, RequestOutput
from twostroke.kernels.native_library import library
from twostroke.model.load import load_model
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

PROMPT = [3, 7, 1, 9, 4, 4, 2, 8, 30, 11, 12, 5, 6, 17, 21, 22, 40, 3, 3, 2]
STOPS = (3, 8, 14, 21, 35, 40, 52, 66, 71, 88)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama")[1]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def make(directory: Path, **changes: Any) -> LLM:
    return LLM(directory, **{"dtype": "fp32", "n_threads": 1, "page_tokens": 4, "max_running": 8} | changes)


def beams(**changes: Any) -> SamplingParams:
    fields = {"temperature": 0.0, "max_tokens": 14, "use_beam_search": True, "n": 4, "stop_token_ids": STOPS} | changes
    return SamplingParams(**fields)


def tokens(output: RequestOutput) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


@pytest.mark.parametrize("runner", ["native", "torch"])
def test_one_beam_is_greedy(llama: Path, runner: str) -> None:
    if runner == "native" and library() is None:
        pytest.skip("the native library was not built")
    llm = make(llama, runner=runner)
    params = beams(n=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=14, stop_token_ids=STOPS, logprobs=0)
    for prompt in (PROMPT, PROMPT[:3], [50, 51, 52, 53]):
        (found,), (expected,) = llm.generate(prompt, params)[0].outputs, llm.generate(prompt, greedy)[0].outputs
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason
        assert found.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in expected.logprobs or ()), abs=1e-5)


def test_both_runners_find_the_same(llama: Path) -> None:
    if library() is None:
        pytest.skip("the native library was not built")
    native, plain = (make(llama, runner=runner).generate(PROMPT, beams())[0] for runner in ("native", "torch"))
    assert tokens(native) == tokens(plain)
    assert len({tuple(answer) for answer in tokens(native)}) == 4


def test_the_prompt_is_computed_once_and_pages_are_shared(llama: Path) -> None:
    llm = make(llama)
    llm.generate(PROMPT, beams(stop_token_ids=(), ignore_eos=True))
    stats = llm.stats()
    assert stats.prefill_tokens == len(PROMPT)
    assert stats.decode_tokens == 4 * 13
    assert (stats.output_tokens, stats.pages_used) == (4 * 14, 0)


def test_other_requests_run_beside_a_search(llama: Path) -> None:
    drawn = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=2, repetition_penalty=1.2)
    prompts, params = [PROMPT, PROMPT[:9], PROMPT[2:], PROMPT[:5]], [drawn, beams(repetition_penalty=1.3), drawn, beams(n=2)]
    alone = [make(llama).generate(*each)[0] for each in zip(prompts, params, strict=True)]
    together = make(llama, token_budget=9).generate(prompts, params)
    for one, other in zip(alone, together, strict=True):
        assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]
        assert [a.logprobs for a in one.outputs] == [a.logprobs for a in other.outputs]


def test_preempted_searches_find_the_same(llama: Path) -> None:
    params = beams(stop_token_ids=(), ignore_eos=True, max_tokens=24)
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:], PROMPT[8:], PROMPT[:12]]
    roomy = make(llama, max_running=20).generate(prompts, params)
    pool = make(llama).engine.pool
    llm = make(llama, max_running=20, kv_cache_bytes=pool.n_bytes // pool.n_pages * 30, max_model_len=60)
    tight = llm.generate(prompts, params)
    assert llm.stats().preemptions > 0
    assert llm.stats().pages_used == 0
    assert [tokens(output) for output in tight] == [tokens(output) for output in roomy]
    assert [a.cumulative_logprob for o in tight for a in o.outputs] == [a.cumulative_logprob for o in roomy for a in o.outputs]


def test_log_probabilities_are_the_models_own(llama: Path) -> None:
    found = make(llama).generate(PROMPT, beams(logprobs=3, prompt_logprobs=1))[0]
    decoder = load_model(llama).eval()
    for answer in found.outputs:
        with torch.no_grad():
            rows = decoder(torch.tensor([PROMPT + answer.token_ids]))[0].log_softmax(dim=-1)
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        for i, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            row = rows[len(PROMPT) + i - 1]
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
        assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in answer.logprobs), abs=1e-5)
    assert found.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == len(PROMPT) - 1


def test_biases_penalties_and_least_lengths_are_those_of_transformers(tmp_path: Path) -> None:
    model: Any = transformers_model("qwen3", seed=2)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64), max_new_tokens=14,
            num_beams=4, num_return_sequences=4, do_sample=False, use_cache=False, eos_token_id=[1, *STOPS], pad_token_id=0,
            min_new_tokens=6, repetition_penalty=1.4, sequence_bias={(5,): 3.0, (60,): -4.0},
        )  # fmt: skip
    params = beams(min_tokens=6, repetition_penalty=1.4, logit_bias={5: 3.0, 60: -4.0})
    found = tokens(make(tmp_path).generate(PROMPT, params)[0])
    for answer, row in zip(found, made[:, len(PROMPT) :].tolist(), strict=True):
        assert answer == row[: len(answer)]
        assert len(answer) == 14 or answer[-1] in (1, *STOPS)
        assert len(answer) >= 6


def test_adapters_search_as_the_merged_model(tmp_path: Path) -> None:
    base, adapters, _ = lora_models("llama", tmp_path, 2)
    llm = LLM(base, {str(i): adapter for i, adapter in enumerate(adapters)}, dtype="fp32", n_threads=1, page_tokens=4)
    found = llm.generate([PROMPT] * 3, beams(), lora=["0", None, "1"])
    expected = [make(directory).generate(PROMPT, beams())[0] for directory in (adapters[0], base, adapters[1])]
    assert [tokens(output) for output in found] == [tokens(output) for output in expected]
    assert tokens(found[0]) != tokens(found[1])
    assert all(adapter.n_users == 0 for adapter in llm.engine.adapters.known.values())


@pytest.mark.parametrize("n_stops", [0, 1, 2])
def test_a_stop_string_ends_a_beam_where_it_ends_its_text(talker: Path, n_stops: int) -> None:
    """Stops are what is said most often without any: the model was trained on another text in each release of Python."""
    llm, tokenizer = make(talker), load_tokenizer(talker)
    prompt = tokenizer.encode("def add_argument(self").ids
    said = "".join(map(tokenizer.decode, searched_plainly(talker, prompt, 3, 10, ("zzzz",))))
    stop = tuple(letter for letter, _ in Counter(filter(str.isascii, said)).most_common(n_stops)) or ("zzzz",)
    params = SamplingParams(temperature=0.0, max_tokens=10, use_beam_search=True, n=3, stop=stop, early_stopping=True)
    (output,) = llm.generate([prompt], params)
    assert [a.token_ids for a in output.outputs] == searched_plainly(talker, prompt, 3, 10, stop)
    for answer in output.outputs:
        ended = answer.finish_reason == "stop"
        assert ended == any(s in tokenizer.decode(answer.token_ids) for s in stop)
        assert not any(s in answer.text for s in stop)
        assert ended or len(answer.token_ids) == 10
    assert (not n_stops) == all(a.finish_reason == "length" for a in output.outputs)


def searched_plainly(directory: Path, prompt: list[int], width: int, longest: int, stop: tuple[str, ...]) -> list[list[int]]:
    """Beam search that ends early, with whole texts and without a cache. No end token is near."""
    decoder, tokenizer = load_model(directory).eval(), load_tokenizer(directory)
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        every = []
        for score, answer in live:
            with torch.no_grad():
                row = decoder(torch.tensor([prompt + answer]))[0, -1].float().log_softmax(dim=-1).tolist()
            every += [(score + logprob, [*answer, token]) for token, logprob in enumerate(row)]
        every.sort(reverse=True)
        live = []
        for i, (score, answer) in enumerate(every):
            if length == longest or any(s in tokenizer.decode(answer) for s in stop):
                if i < width:
                    ended.append((score / length, answer))
            elif len(live) < width:
                live.append((score, answer))
            if i >= width and len(live) == width:
                break
        ended = sorted(ended, reverse=True)[:width]
        if len(ended) == width:
            break
    return [answer for _, answer in ended]


def test_drafts_leave_searches_alone_and_help_others(llama: Path) -> None:
    if library() is None:
        pytest.skip("the native library was not built")
    repeating = [[5, 9, 3, 44] * 6, [2, 6] * 9]
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = [*repeating, PROMPT], [greedy, greedy, beams(max_tokens=40, stop_token_ids=(), ignore_eos=True)]
    plain = make(llama).generate(*asked)
    drafting = make(llama, speculate="ngram")
    assert [tokens(output) for output in drafting.generate(*asked)] == [tokens(output) for output in plain]
    assert drafting.stats().draft_tokens > 0


def test_an_aborted_search_leaves_nothing(llama: Path) -> None:
    core = make(llama).engine
    core.add_request("a", PROMPT, beams())
    for _ in range(5):
        assert core.step() == []
    assert core.stats().pages_used > 0
    core.abort("a")
    assert not core.has_work
    assert core.stats().pages_used == core.stats().running == 0
    core.add_request("a", PROMPT, beams())
    events = []
    while core.has_work:
        events += core.step()
    assert {event.index for event in events if event.finish_reason is not None} == {0, 1, 2, 3}


def test_a_search_out_of_time_gives_what_it_has(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make(llama).engine
    core.add_request("a", PROMPT, beams(stop_token_ids=(), ignore_eos=True, max_tokens=200), timeout_s=1000.0)
    for _ in range(3):
        core.step()
    later = time.monotonic() + 1001.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    events = core.step()
    assert [(event.index, event.finish_reason) for event in events] == [(i, "timeout") for i in range(4)]
    assert all(len(event.token_ids) == 3 for event in events)
    assert len({tuple(event.token_ids) for event in events}) == 4
    assert core.stats().pages_used == 0


def test_a_search_without_finite_logits_fails_alone(tmp_path: Path) -> None:
    decoder, healthy = saved("llama", tmp_path / "healthy")
    first = tokens(make(healthy).generate(PROMPT, beams())[0])
    bystander = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = tokens(make(healthy).generate(PROMPT[:4], bystander)[0])
    broken = next(answer[1] for answer in first if answer[1] not in (*PROMPT, *alone[0]))
    with torch.no_grad():
        decoder.embed.weight[broken] = float("nan")
    core = make(save_model(decoder, decoder.spec, tmp_path / "broken")).engine
    core.add_request("bad", PROMPT, beams(stop_token_ids=(), ignore_eos=True))
    core.add_request("prompt", [*PROMPT, broken, 4], beams(n=2))
    core.add_request("good", PROMPT[:4], bystander)
    events = []
    while core.has_work:
        events += core.step()
    for name, n in (("bad", 4), ("prompt", 2)):
        ends = [(e.index, e.finish_reason, e.token_ids) for e in events if e.request_id == name]
        assert ends == [(i, "error", []) for i in range(n)]
    assert [token for e in events if e.request_id == "good" for token in e.token_ids] == alone[0]
    assert (core.stats().failed_requests, core.stats().pages_used) == (2, 0)


def test_an_interrupted_step_changes_no_answer(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(make(llama).generate(PROMPT, beams())[0])
    core = make(llama).engine
    core.add_request("a", PROMPT, beams())
    found: dict[int, list[int]] = {}
    compute, n = core.compute, 0
    while core.has_work:
        n += 1
        if n % 3 == 0:

            def interrupted(*_: Any) -> Any:
                raise KeyboardInterrupt

            monkeypatch.setattr(core, "compute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                core.step()
            monkeypatch.setattr(core, "compute", compute)
        for event in core.step():
            found.setdefault(event.index, []).extend(event.token_ids)
        assert n < 400
    assert [found[i] for i in range(4)] == expected


def test_long_answers_come_in_pieces(llama: Path) -> None:
    core = make(llama).engine
    core.add_request("a", PROMPT, beams(n=2, max_tokens=60, stop_token_ids=(), ignore_eos=True, logprobs=20))
    events = []
    while core.has_work:
        events += core.step()
    assert max(len(event.token_ids) for event in events) * 21 <= EVENT_ENTRIES
    assert [sum(len(e.token_ids) for e in events if e.index == i) for i in (0, 1)] == [60, 60]
    assert [e.index for e in events if e.finish_reason is not None] == [0, 1]


def test_the_method_of_vllm_gives_the_same_answers(talker: Path) -> None:
    llm = make(talker)
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5)
    (found,) = llm.beam_search("def add", params)
    same = SamplingParams(temperature=0.0, max_tokens=8, use_beam_search=True, n=3, length_penalty=0.5)
    (expected,) = llm.generate("def add", same)
    assert [s.text for s in found.sequences] == ["def add" + answer.text for answer in expected.outputs]
    assert [s.tokens for s in found.sequences] == [expected.prompt_token_ids + answer.token_ids for answer in expected.outputs]
    for sequence in found.sequences:
        assert sequence.cum_logprob == pytest.approx(sum(entry.logprob for entry in sequence.logprobs), abs=1e-5)
    with pytest.raises(InputError, match=r"temperature=0\.5 draws tokens"):
        llm.beam_search("def add", BeamSearchParams(2, 4, temperature=0.5))


def test_what_cannot_be_searched_is_refused_and_leaves_nothing(llama: Path) -> None:
    core = make(llama).engine
    with pytest.raises(InputError, match="98 beams are more than the vocabulary's 97 tokens"):
        core.add_request("a", PROMPT, beams(n=98))
    with pytest.raises(DataError, match=r"has no tokenizer\.json, so stop strings cannot be found"):
        core.add_request("a", PROMPT, beams(stop=("x",)))
    with pytest.raises(InputError, match="a search of 9 beams needs as many running requests, and max_running=8"):
        core.add_request("a", PROMPT, beams(n=9))
    small = make(llama, kv_cache_bytes=core.pool.n_bytes // core.pool.n_pages * 20).engine
    with pytest.raises(CapacityError, match="KV-cache pages"):
        small.add_request("a", PROMPT, beams(max_tokens=50))
    assert not core.has_work
