from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_models import decoder_of
from twostroke.core.errors import CapacityError, DataError, InputError
from twostroke.data.tokenizer import train_tokenizer
from twostroke.engine.llm import LLM
from twostroke.interop.import_model import import_model
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 300 tokens with a byte-level tokenizer: nonsense, but text."""
    folder = tmp_path_factory.mktemp("llm")
    text = "the quick brown fox jumps over the lazy dog. " * 20
    train_tokenizer(iter([text]), 300, folder / "tokenizer.json")
    decoder = decoder_of("llama", vocab_size=300, eos_token_ids=(0,))
    return save_model(decoder, decoder.spec, folder / "model", tokenizer_path=folder / "tokenizer.json")


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory, dtype="fp32", n_threads=1, page_tokens=4)


@pytest.fixture(scope="module")
def stories(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source, folder = assets / "weights" / "stories260K", tmp_path_factory.mktemp("stories")
    if not source.is_dir():
        pytest.skip(f"the stories260K weights are not in {source}")
    for kind in ("bin", "gguf"):
        import_model(str(source / f"stories260K.{kind}"), folder / kind)
    return {kind: folder / kind for kind in ("bin", "gguf")}


@pytest.mark.parametrize("kind", ["bin", "gguf"])
def test_stories260k_continues_exactly(stories: dict[str, Path], assets: Path, kind: str) -> None:
    expected = json.loads((assets / "weights/stories260K/expected_greedy_200_ids.json").read_text())
    text = (assets / "weights/stories260K/expected_greedy_200.txt").read_text()
    model = LLM(stories[kind], dtype="fp32", n_threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=expected["steps"], ignore_eos=True)
    (alone,) = model.generate([[expected["bos"]]], params)
    assert alone.outputs[0].token_ids == expected["greedy_token_ids"][-200:]
    assert alone.outputs[0].text.strip() == text.strip()
    # And in company: other prompts beside it, and its own prefix in the cache.
    prompts = ["Once upon a time", "The dog", [expected["bos"]], "Lily and Tom went to the park and"]
    together = model.generate(prompts, params)
    assert together[2].outputs[0].token_ids == alone.outputs[0].token_ids


def test_stories260k_goes_on_after_a_text_prompt_with_its_space(stories: dict[str, Path]) -> None:
    model = LLM(stories["bin"], dtype="fp32", n_threads=1)
    (output,) = model.generate("Once upon a", SamplingParams(temperature=0.0, max_tokens=12))
    assert output.outputs[0].text.startswith(" time, there was")


def test_prompts_may_be_texts_or_ids_one_or_many(llm: LLM) -> None:
    text = "the quick brown"
    ids = llm.tokenizer.encode(text).ids
    one = llm.generate(text, GREEDY)
    assert [o.prompt for o in one] == [text]
    assert one[0].prompt_token_ids == ids
    for same in (llm.generate([text], GREEDY), llm.generate(ids, GREEDY), llm.generate([ids], GREEDY)):
        assert same[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    many = llm.generate([text, ids, "fox"], GREEDY)
    assert [o.prompt for o in many] == [text, None, "fox"]
    assert many[0].outputs == many[1].outputs


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    outputs = llm.generate(["the", "fox"], [SamplingParams(max_tokens=2, ignore_eos=True), GREEDY])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 20]
    with pytest.raises(InputError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["the", "fox"], [GREEDY])


def test_text_is_that_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate("the quick", GREEDY)
    completion = output.outputs[0]
    whole = llm.tokenizer.decode(output.prompt_token_ids + completion.token_ids)
    assert "the quick" + completion.text == whole
    assert completion.finish_reason == "length"
    assert (output.metrics.prompt_tokens, output.metrics.output_tokens) == (len(output.prompt_token_ids), 20)
    assert 0 < output.metrics.ttft_s <= output.metrics.e2e_s


def test_pieces_streamed_are_the_whole_answer(llm: LLM) -> None:
    whole = llm.generate(["the quick", "dog"], GREEDY)
    text, tokens, ends = ["", ""], [[], []], [None, None]  # type: ignore[var-annotated]
    for delta in llm.stream(["the quick", "dog"], GREEDY):
        text[delta.index] += delta.text
        tokens[delta.index] += delta.token_ids
        ends[delta.index] = delta.finish_reason
    assert text == [o.outputs[0].text for o in whole]
    assert tokens == [o.outputs[0].token_ids for o in whole]
    assert ends == ["length", "length"]


def test_two_streams_at_once_get_their_own_tokens(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in ("the quick", "dog")]
    streams = [llm.stream("the quick", GREEDY), llm.stream("dog", GREEDY)]
    found: list[list[int]] = [[], []]
    open_streams = [0, 1]
    while open_streams:
        for i in list(open_streams):
            delta = next(streams[i], None)
            if delta is None:
                open_streams.remove(i)
            else:
                found[i] += delta.token_ids
    assert found == expected
    assert not llm._inbox


def test_closing_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream("the quick", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.stats().pages_used == 0


def test_text_ends_before_a_stop_string_and_the_engine_stops_as_well(llm: LLM) -> None:
    free = llm.generate("the quick", GREEDY)[0].outputs[0]
    stop = free.text[5:8]
    assert stop in free.text
    steps = llm.stats().decode_steps
    stopped = llm.generate("the quick", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=(stop,)))[
        0
    ].outputs[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert llm.stats().decode_steps - steps < 20
    assert not llm.engine.has_work


def test_a_stop_token_is_in_the_ids_but_not_in_the_text(llm: LLM) -> None:
    free = llm.generate("the quick", GREEDY)[0].outputs[0]
    token = free.token_ids[4]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=(token,))
    stopped = llm.generate("the quick", params)[0].outputs[0]
    first = free.token_ids.index(token)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    ids = llm.tokenizer.encode("the quick").ids
    assert "the quick" + stopped.text == llm.tokenizer.decode(ids + free.token_ids[:first])


def test_logprobs_come_one_for_each_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=2)
    completion = llm.generate("the", params)[0].outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 7
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry.top[0] == (token, entry.logprob)
        assert entry.top[1][1] <= entry.logprob <= 0
    assert llm.generate("the", GREEDY)[0].outputs[0].logprobs is None


def test_one_bad_prompt_means_nothing_is_computed(llm: LLM) -> None:
    before = llm.stats().prefill_steps
    for bad, error in (([999_999], InputError), ([5] * 300, CapacityError), ("", InputError)):
        with pytest.raises(error):
            llm.generate(["the", bad], GREEDY)  # type: ignore[list-item]
        assert not llm.engine.has_work
    assert llm.stats().prefill_steps == before


def test_half_a_surrogate_pair_is_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="surrogate"):
        llm.generate("a\ud83d", GREEDY)


def test_without_a_tokenizer_there_are_ids_only(tmp_path: Path) -> None:
    decoder = decoder_of("llama")
    model = LLM(save_model(decoder, decoder.spec, tmp_path / "m"), dtype="fp32", n_threads=1)
    completion = model.generate([5, 6], GREEDY)[0].outputs[0]
    assert (completion.text, len(completion.token_ids)) == ("", 20)
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        model.generate("text", GREEDY)
    with pytest.raises(DataError, match="stop_token_ids"):
        model.generate([5], SamplingParams(stop=("x",)))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_every_way_to_hold_weights_generates(name: str, dtype: str, tmp_path: Path) -> None:
    decoder = decoder_of(name, d_model=96, head_dim=16, d_ff=160)
    model = LLM(
        save_model(decoder, decoder.spec, tmp_path / "m"),
        dtype=dtype,
        n_threads=1,
        page_tokens=4,
        token_budget=16,
        max_running=8,
    )
    outputs = model.generate([[i + 2, i + 3, i + 4] * (i + 1) for i in range(6)], GREEDY)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [20] * 6
    assert model.engine.dtype == dtype
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_the_output_of_a_training_run_is_a_model(directory: Path, tmp_path: Path, llm: LLM) -> None:
    (tmp_path / "model").symlink_to(directory)
    assert LLM(tmp_path, dtype="fp32", n_threads=1).generate("fox", GREEDY)[0].outputs == llm.generate("fox", GREEDY)[0].outputs


@pytest.mark.alone
def test_starting_costs_little_beyond_torch(directory: Path) -> None:
    """In a fresh process: everything but importing torch, with a first token, within a second (0.1 s on a quiet core)."""
    code = (
        "import sys, time, torch; began = time.perf_counter()\n"
        "from twostroke import LLM, SamplingParams\n"
        f"out = LLM({str(directory)!r}, dtype='bf16', n_threads=1).generate('the', SamplingParams(max_tokens=1))\n"
        "print(time.perf_counter() - began); assert len(out) == 1\n"
        "assert not {'transformers', 'fastapi', 'rich', 'torch._inductor'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # CPU time would hide waiting on a lock, so it is wall time, with room for other programs on the cores
    assert float(result.stdout) < 3.0


def test_vllms_spelling_works() -> None:
    import twostroke

    names: dict[str, Any] = {"LLM": LLM, "SamplingParams": SamplingParams}
    assert {name: getattr(twostroke, name) for name in names} == names
