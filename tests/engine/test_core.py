from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import SPECS, saved
from twostroke.core.contention import OtherPrograms
from twostroke.core.crossovers import Crossovers
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, ConfigError, InputError
from twostroke.core.matrices import qkv_rows
from twostroke.core.policy import default_pages
from twostroke.engine import core as core_module
from twostroke.engine import loading
from twostroke.engine.core import EngineCore
from twostroke.engine.kv_pool import token_bytes
from twostroke.engine.memory import available_bytes
from twostroke.engine.meters import StepMeter
from twostroke.kernels.native_library import library
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama")[1]


def engine(directory: Path, **changes: Any) -> EngineCore:
    return EngineCore(directory, EngineSettings(**{"dtype": "fp32", "n_threads": 1, "page_tokens": 4} | changes))


def run(core: EngineCore) -> dict[str, tuple[list[int], str | None]]:
    found: dict[str, tuple[list[int], str | None]] = {}
    while core.has_work:
        for event in core.step():
            tokens, _ = found.get(event.request_id, ([], None))
            found[event.request_id] = (tokens + event.token_ids, event.finish_reason)
    return found


def test_a_request_without_finite_logits_fails_alone(tmp_path: Path) -> None:
    """One token has no finite embedding. A request with it must end, and nobody else notice, then or later."""
    decoder, healthy = saved("llama", tmp_path / "healthy")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    good = [[5, 9, 30, 31, 32, 33], [60, 61], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
    alone = [run_one(healthy, prompt, params) for prompt in good]
    broken = next(token for token in range(97) if not any(token in tokens for tokens in good + alone))
    with torch.no_grad():
        decoder.embed.weight[broken] = float("nan")
    core = engine(save_model(decoder, decoder.spec, tmp_path / "broken"))
    for i, prompt in enumerate(good):
        core.add_request(f"good{i}", prompt, params)
    core.add_request("bad", [3, 4, 5, 6, broken, 8, 9, 10, 11, 12], params)
    found = run(core)
    assert found["bad"] == ([], "error")
    assert [found[f"good{i}"][0] for i in range(3)] == alone
    stats = core.stats()
    assert (stats.failed_requests, stats.pages_used) == (1, 0)
    # Requests that are given those pages next are as before.
    for i, prompt in enumerate(good):
        core.add_request(f"next{i}", prompt, params)
    found = run(core)
    assert [found[f"next{i}"][0] for i in range(3)] == alone


@pytest.mark.parametrize("runner", ["native", "torch"])
@pytest.mark.parametrize("n_best", [0, 1, 5, 20])
def test_a_prompt_that_cannot_be_scored_fails_alone(tmp_path: Path, runner: str, n_best: int) -> None:
    """In its middle, steps before a token is sampled, and at its end."""
    if runner == "native" and library() is None:
        pytest.skip("the native library was not built")
    decoder, _ = saved("llama", tmp_path / "healthy")
    with torch.no_grad():
        decoder.embed.weight[96] = float("nan")
    core = engine(save_model(decoder, decoder.spec, tmp_path / "broken"), runner=runner, token_budget=8, max_running=8)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=n_best, logit_bias=((96, -100.0),))
    prompts = {
        "good": [*range(5, 25)],
        "bad": [3, 4, 96, *range(5, 30)],
        "bad at its end": [*range(30, 41), 96],
        "fine": [60, 61],
    }
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)
    scored: dict[str, int] = {}
    reasons: dict[str, str | None] = {}
    left = 0
    while core.has_work:
        if "bad" in core.scheduler.requests:
            left = len(prompts["bad"]) - core.scheduler.requests["bad"].n_computed
        for event in core.step():
            reasons[event.request_id] = event.finish_reason
            if event.prompt_logprobs is not None:
                scored[event.request_id] = scored.get(event.request_id, 0) + len(event.prompt_logprobs)
                assert not event.token_ids
                assert {len(entry.top) for entry in event.prompt_logprobs} == {n_best}
    assert reasons == {"good": "length", "bad": "error", "bad at its end": "error", "fine": "length"}
    assert left > 16, "two steps and more before its last row"
    assert {name: n for name, n in scored.items() if reasons[name] != "error"} == {"good": 19, "fine": 1}
    stats = core.stats()
    assert (stats.failed_requests, stats.pages_used, stats.output_tokens) == (2, 0, 6)


def run_one(directory: Path, prompt: list[int], params: SamplingParams, **changes: Any) -> list[int]:
    core = engine(directory, **changes)
    core.add_request("a", prompt, params)
    return run(core)["a"][0]


def test_sampled_tokens_do_not_depend_on_the_batch_or_on_preemption(llama: Path) -> None:
    rng = random.Random(1)
    requests = [
        (
            [rng.randrange(97) for _ in range(rng.randrange(1, 20))],
            SamplingParams(temperature=t, top_p=p, seed=i, max_tokens=16),
        )
        for i, (t, p) in enumerate([(1.0, 1.0), (0.8, 0.9), (1.5, 0.5), (0.0, 1.0), (1.0, 0.95)])
    ]
    alone = [run_one(llama, prompt, params) for prompt, params in requests]
    page = token_bytes(SPECS["llama"], "fp32") * 4
    core = engine(llama, kv_cache_bytes=16 * page, max_model_len=60, max_running=5, token_budget=16)
    for i, (prompt, params) in enumerate(requests):
        core.add_request(str(i), prompt, params)
    found = run(core)
    assert core.stats().preemptions > 0
    assert [found[str(i)][0] for i in range(len(requests))] == alone


def test_requests_without_a_seed_differ(llama: Path) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True)
    core = engine(llama)
    core.add_request("a", [5], params)
    core.add_request("b", [5], params)
    found = run(core)
    assert found["a"][0] != found["b"][0]


def test_abort_between_steps_frees_everything(llama: Path) -> None:
    core = engine(llama)
    core.add_request("a", [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    core.add_request("b", [5, 6, 8], SamplingParams(max_tokens=4, ignore_eos=True))
    core.step()
    core.abort("a")
    core.abort("never heard of")
    assert set(run(core)) == {"b"}
    assert core.stats().pages_used == 0


def test_an_interrupted_step_loses_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = run_one(llama, [5, 6, 7], params)
    core = engine(llama)
    core.add_request("a", [5, 6, 7], params)
    found: list[int] = []
    for i in range(12):
        with monkeypatch.context() as broken:
            broken.setattr(core_module, "verify", interrupt if i % 3 == 0 else core_module.verify)
            try:
                events = core.step()
            except KeyboardInterrupt:
                continue
        found += [token for event in events for token in event.token_ids]
    found += run(core)["a"][0]
    assert found == alone
    assert core.stats().pages_used == 0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_end_token_of_the_model_stops_it(llama: Path) -> None:
    params = SamplingParams(temperature=3.0, seed=2, max_tokens=200)
    tokens = run_one(llama, [5], params)
    assert tokens[-1] == 1 == SPECS["llama"].eos_token_ids[0]
    assert 1 not in tokens[:-1]
    longer = run_one(llama, [5], SamplingParams(temperature=3.0, seed=2, max_tokens=200, ignore_eos=True))
    assert longer[: len(tokens)] == tokens
    assert len(longer) == 200


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [([97], "token 97 is not in the model's vocabulary of 97"), ([-1], "token -1"), ([], "no tokens"), (["a"], "token ids")],
)
def test_a_prompt_that_is_none_is_refused(llama: Path, prompt: Any, sentence: str) -> None:
    core = engine(llama)
    with pytest.raises(InputError, match=sentence):
        core.add_request("a", prompt, SamplingParams())
    assert not core.has_work


def test_a_prompt_that_fills_the_context_is_refused(llama: Path) -> None:
    core = engine(llama, max_model_len=16)
    with pytest.raises(CapacityError, match="16 tokens and max_model_len=16"):
        core.add_request("a", [5] * 16, SamplingParams())
    core.add_request("b", [5] * 12, SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(run(core)["b"][0]) == 4


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"dtype": "int5"}, ConfigError, "dtype='int5'"),
        ({"max_model_len": 257}, ConfigError, "max_model_len=257 is beyond the model's max_positions=256"),
        ({"max_model_len": 1}, ConfigError, "max_model_len=1"),
        ({"kv_cache_bytes": 10}, ConfigError, "kv_cache_bytes=10 is less than one page"),
        ({"kv_cache_bytes": 2**60}, CapacityError, "of memory that is free"),
        ({"kv_cache_bytes": 40_000, "max_model_len": 256}, CapacityError, "max_model_len=256 needs"),
        ({"token_budget": 3, "max_running": 4}, ConfigError, "token_budget=3"),
        ({"n_threads": 0}, ConfigError, "n_threads=0"),
    ],
)
def test_impossible_settings_are_sentences(llama: Path, changes: dict[str, Any], error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        engine(llama, **changes)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda: 1000)
    monkeypatch.setattr(loading, "load_any_state", lambda _: pytest.fail("weights were read"))
    with pytest.raises(CapacityError, match="1000 B of memory is free"):
        engine(llama)


NEEDS_NATIVE = pytest.mark.skipif(library() is None, reason="the native library was not built")


@pytest.mark.parametrize(
    ("runner", "bf16_products", "expected"),
    [("torch", True, "bf16"), ("torch", False, "fp32"), pytest.param("native", False, "bf16", marks=NEEDS_NATIVE)],
)
def test_auto_holds_weights_in_bf16_where_it_is_multiplied(
    llama: Path, monkeypatch: pytest.MonkeyPatch, runner: str, bf16_products: bool, expected: str
) -> None:
    """By the native library everywhere, by torch where the processor has what it needs."""
    monkeypatch.setattr(loading, "has_packed_linear", lambda _: bf16_products)
    assert engine(llama, dtype="auto", runner=runner).dtype == expected


def test_a_smaller_cache_means_a_shorter_context_unless_one_was_asked_for(llama: Path) -> None:
    core = engine(llama, kv_cache_bytes=token_bytes(SPECS["llama"], "fp32") * 40)
    assert core.max_model_len == 40
    assert core.kv_cache_bytes == token_bytes(SPECS["llama"], "fp32") * 40


def test_the_default_cache_is_bounded_by_use_and_by_memory(llama: Path) -> None:
    assert engine(llama, max_running=3).scheduler.config.n_pages == 3 * 256 // 4
    assert default_pages(100, available_bytes=1000, longest_tokens=64, max_running=10, page_tokens=16) == 10
    assert default_pages(100, 10**9, 64, 2, 16) == 8
    assert 0 < available_bytes() < 2**50


def test_stats_count_what_was_done(llama: Path) -> None:
    core = engine(llama, token_budget=128)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    core.add_request("a", [5] * 10, params)
    run(core)
    core.add_request("b", [5] * 10, params)
    run(core)
    stats = core.stats()
    assert (stats.prefill_steps, stats.decode_steps, stats.mixed_steps) == (2, 8, 0)
    assert (stats.prompt_tokens, stats.prefix_hit_tokens, stats.prefill_tokens) == (20, 9, 11)
    assert (stats.output_tokens, stats.decode_tokens) == (10, 8)
    per_token = token_bytes(SPECS["llama"], "fp32")
    keys = 2 * (11 + 12 + 13 + 14)  # each decode step attends to all before it and to itself
    assert stats.decode_bytes == 8 * core.plan.step_bytes + keys * per_token
    assert stats.prefill_s > 0
    assert stats.decode_s > 0


@pytest.mark.parametrize(("n_threads", "expected"), [(None, 1), (2, 2)])
def test_small_steps_run_on_one_thread_unless_more_were_asked_for(
    llama: Path, monkeypatch: pytest.MonkeyPatch, n_threads: int | None, expected: int
) -> None:
    used = []
    verify = core_module.verify
    monkeypatch.setattr(core_module, "verify", lambda *a: used.append(torch.get_num_threads()) or verify(*a))
    monkeypatch.setattr(core_module, "default_threads", lambda: 2)
    core = engine(llama, n_threads=n_threads)
    core.add_request("a", [5], SamplingParams(max_tokens=3, ignore_eos=True))
    run(core)
    assert used == [expected] * 3
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("in_server", "expected"), [(False, 2), (True, 1)])
def test_more_steps_run_on_one_thread_in_a_server(
    llama: Path, monkeypatch: pytest.MonkeyPatch, in_server: bool, expected: int
) -> None:
    monkeypatch.setattr(core_module, "default_threads", lambda: 2)
    monkeypatch.setattr(OtherPrograms, "left", lambda self, n: n)
    core = engine(llama, n_threads=None, in_server=in_server)
    core.plan = dataclasses.replace(core.plan, crossovers=Crossovers(one_thread_max_flop=0.0, server_row_flop=1e9))
    core.add_request("a", [5], SamplingParams(max_tokens=3, ignore_eos=True))
    core.step()
    assert core.threads_for(core.scheduler.schedule(None)) == expected


@pytest.mark.parametrize(("n_threads", "expected"), [(None, 1), (2, 2)])
def test_a_processor_that_another_program_takes_is_left_to_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch, n_threads: int | None, expected: int
) -> None:
    used = []
    verify = core_module.verify
    monkeypatch.setattr(core_module, "verify", lambda *a: used.append(torch.get_num_threads()) or verify(*a))
    monkeypatch.setattr(core_module, "default_threads", lambda: 2)
    monkeypatch.setattr(OtherPrograms, "left", lambda self, n: n - 1)
    core = engine(llama, n_threads=n_threads)
    core.plan = dataclasses.replace(core.plan, crossovers=Crossovers(one_thread_max_flop=0.0))  # else small steps take one
    core.add_request("a", [5], SamplingParams(max_tokens=3, ignore_eos=True))
    run(core)
    assert used == [expected] * 3


def test_the_meter_counts_products_and_visible_pairs_as_a_loop_does() -> None:
    spec = SPECS["qwen2"].with_(sliding_window=5)  # layer 0 sees all, layers 1 and 2 five keys
    meter = StepMeter(spec, 1000, 3 * 64)
    starts, counts = [0, 7, 3], [4, 1, 6]
    pairs = keys = 0
    for layer in range(spec.n_layers):
        window = spec.window_of_layer(layer) or 10**9
        for s, n in zip(starts, counts, strict=True):
            pairs += sum(min(position + 1, window) for position in range(s, s + n))
            keys += len({k for position in range(s, s + n) for k in range(max(0, position - window + 1), position + 1)})
    assert meter.bytes_read(starts, counts) == 1000 + 64 * keys
    qkv = 2 * qkv_rows(spec) * spec.d_model
    rest = 2 * (spec.n_heads * spec.head_dim * spec.d_model + 3 * spec.d_ff * spec.d_model)
    products = 11 * (3 * qkv + 2 * rest) + 2 * (rest + 2 * spec.vocab_size * spec.d_model)
    assert meter.flop(starts, counts, n_sampled=2) == products + pairs * 4 * spec.n_heads * spec.head_dim


def test_logprobs_are_those_of_the_decoder(tmp_path: Path) -> None:
    decoder, directory = saved("qwen3", tmp_path / "m")
    core = engine(directory)
    prompt = [5, 6, 7, 8, 9]
    core.add_request("a", prompt, SamplingParams(temperature=0.9, seed=3, max_tokens=6, logprobs=3, ignore_eos=True))
    tokens, entries = list(prompt), []
    while core.has_work:
        for event in core.step():
            tokens += event.token_ids
            entries += event.logprobs or []
    with torch.inference_mode():
        expected = decoder(torch.tensor([tokens]))[0].log_softmax(dim=-1)
    for i, entry in enumerate(entries):
        row = expected[len(prompt) - 1 + i]
        assert entry.logprob == pytest.approx(float(row[tokens[len(prompt) + i]]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
