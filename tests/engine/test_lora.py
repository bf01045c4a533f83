"""Adapters served beside a base: equal to merged weights in every batch, kept apart in the cache, held within a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import adapter_of, models
from safetensors.torch import load_file, save_file

from small_models import EVERY, decoder_of
from twostroke.core.errors import CapacityError, ConfigError, CorruptFileError, InputError
from twostroke.core.schemes import TORCH_WEIGHTS
from twostroke.engine import plan as p
from twostroke.engine.adapters import Adapter, Part, parts_of
from twostroke.engine.batch import BatchBuilder
from twostroke.engine.core import EngineCore
from twostroke.engine.interpreter import TorchInterpreter
from twostroke.engine.llm import LLM
from twostroke.engine.native_adapters import NativeAdapter
from twostroke.kernels.native_library import holding, library, set_target
from twostroke.model.adapter_directory import (
    CONFIG_NAME,
    OWN_NAME,
    SCALED_INPUTS,
    WEIGHTS_NAME,
    Adapters,
    read_adapter_config,
)
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.planner.serving.adapters import adapters_in, held_bytes
from twostroke.planner.serving.shape import ServingShape
from twostroke.scheduling.sampling_params import SamplingParams

RUNNERS = ("torch", "native") if library() is not None else ("torch",)
PROMPTS = [
    [5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 1, 4, 4, 4, 12, 13],
    [30, 31, 32, 5, 6],
    [77],
    [5, 9, 3, 44, 7, 8, 90],
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# Absorbed matrices of latent attention cannot be adapted.
SERVED = [name for name in EVERY if EVERY[name].mla is None]


@torch.inference_mode()
def continued(decoder: Decoder, prompt: list[int], n: int = 12) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def answers(llm: LLM, prompts: list[list[int]], loras: list[str | None], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, lora=loras)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", SERVED)
def test_rows_of_several_adapters_and_of_none_compute_what_merged_models_compute(
    name: str, runner: str, tmp_path: Path
) -> None:
    """In fp32, greedy, prompts in chunks, adapters in one batch."""
    base, adapters, merged = models(name, tmp_path, 2)
    llm = LLM(base, {"a": adapters[0], "b": adapters[1]}, dtype="fp32", runner=runner, token_budget=16, max_running=8)
    loras: list[str | None] = ["b", None, "a", "a"]
    by_name = {"a": merged[0], "b": merged[1], None: decoder_of(name)}
    expected = [continued(by_name[lora], prompt) for prompt, lora in zip(PROMPTS, loras, strict=True)]
    assert answers(llm, PROMPTS, loras) == expected
    assert expected[3] != continued(by_name["b"], PROMPTS[3]) or expected[0] != continued(by_name["a"], PROMPTS[0])


def first_logits(core: EngineCore, prompts: list[list[int]], loras: list[str | None]) -> torch.Tensor:
    """Logits after each prompt, all of them in one step."""
    for i, (prompt, lora) in enumerate(zip(prompts, loras, strict=True)):
        core.add_request(str(i), prompt, GREEDY, lora=lora)
    step = core.scheduler.schedule()
    logits = core.compute(step).clone()
    core.scheduler.abandon(step)
    for i in range(len(prompts)):
        core.abort(str(i))
    return logits


@torch.inference_mode()
def exact_logits(decoders: list[Decoder], prompts: list[list[int]]) -> torch.Tensor:
    return torch.stack([d(torch.tensor([ids]))[0, -1] for d, ids in zip(decoders, prompts, strict=True)])


@pytest.mark.parametrize("dtype", TORCH_WEIGHTS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_adapter_beside_a_rounded_base_is_as_exact_as_the_rounded_merged_model(
    dtype: str, runner: str, tmp_path: Path
) -> None:
    base, adapters, merged = models("llama", tmp_path, 2, size=0.4)
    settings: dict[str, Any] = {"dtype": dtype, "runner": runner}
    exact = exact_logits([merged[0], merged[1], merged[0], decoder_of("llama")], PROMPTS)
    llm = LLM(base, {"a": adapters[0], "b": adapters[1]}, **settings)
    found = first_logits(llm.engine, PROMPTS, ["a", "b", "a", None])
    rounded = torch.cat(
        [
            first_logits(LLM(d, **settings).engine, [ids], [None])
            for d, ids in zip((*adapters, adapters[0], base), PROMPTS, strict=True)
        ]
    )
    off, merged_off = ((x - exact).abs().mean() / exact.std() for x in (found, rounded))
    # The adapter itself is in fp32 or bf16, so what remains is the base's rounding, of other weights than the merged ones.
    assert off <= (1e-5 if dtype == "fp32" else 1.5 * merged_off)
    assert off < 0.5 * ((exact - exact_logits([decoder_of("llama")] * 4, PROMPTS)).abs().mean() / exact.std())


def in_codes(part: Part) -> Part:
    """What codes of 8 bits stand for, with a scale a rank in A and one in B."""
    a, b = part.a / (a_scale := part.a.abs().amax(1, keepdim=True) / 127), part.b / (b_scale := part.b.abs().amax(0) / 127)
    return Part(part.begin, a.round() * a_scale, b.round() * b_scale)


@pytest.fixture
def best_target() -> Iterator[None]:
    yield
    set_target(holding()[-1])


@pytest.mark.skipif(library() is None, reason="needs the native library")
@pytest.mark.parametrize("target", holding())
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_native_step_adds_what_the_interpreter_of_its_plan_adds(
    target: str, dtype: str, best_target: None, tmp_path: Path
) -> None:
    """Few rows on two threads, and so many that threads take chunks. Ranks and widths that 16 does not divide."""
    base, adapters, _ = models("qwen2", tmp_path, 2, rank=5)
    set_target(target)
    prompts = [[(7 * i + j) % 97 for j in range(30 + i)] for i in range(4)]
    for n in (1, 4):
        llm = LLM(base, {"a": adapters[0], "b": adapters[1]}, dtype=dtype, kv_dtype="fp32", runner="native", n_threads=2)
        core, loras = llm.engine, ["a", "b", None, "a"][:n]
        found = first_logits(core, prompts[:n], loras)
        for name in "ab":
            adapter = core.adapters.get(name)
            weights = Adapters(adapter.directory, core.spec, read_adapter_config(adapter.directory))
            parts = parts_of(core.plan, weights, torch.float32)
            adapter.held = {module: tuple(map(in_codes, of)) for module, of in parts.items()} if dtype == "int8" else parts
        for i, (prompt, lora) in enumerate(zip(prompts[:n], loras, strict=True)):
            core.add_request(str(i), prompt, GREEDY, lora=lora)
        step = core.scheduler.schedule()
        batch = BatchBuilder(core.spec, core.scheduler.config, core.plan.dtype).build(step)
        expected = TorchInterpreter(core.plan, core.pool).run(batch)
        off = (found - expected).abs() / expected.std()
        # fp32 sums in another order; in int8 that may move single activations to the next code.
        assert (float(off.max()) <= 1e-4) if dtype == "fp32" else (float(off.mean()) <= 0.005)


@pytest.mark.skipif(library() is None, reason="needs the native library")
@pytest.mark.parametrize("n_tokens", [2, 9])
@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbours_adapters(dtype: str, n_tokens: int, tmp_path: Path) -> None:
    """Adapters by turns: of few rows, whose outputs two threads share out, and of so many that each takes chunks."""
    base, adapters, _ = models("llama", tmp_path, 3)
    llm = LLM(base, {str(i): adapter for i, adapter in enumerate(adapters)}, dtype=dtype, runner="native", n_threads=2)
    prompts = [[(5 * i + j) % 97 for j in range(n_tokens)] for i in range(12)]
    loras = [None if i % 4 == 3 else str(i % 4) for i in range(12)]
    together = first_logits(llm.engine, prompts, loras)
    for i in (0, 3, 5, 10):
        assert torch.equal(first_logits(llm.engine, [prompts[i]], [loras[i]])[0], together[i])


@pytest.mark.parametrize("runner", RUNNERS)
def test_preempted_requests_compute_the_same_again(runner: str, tmp_path: Path) -> None:
    base, adapters, _ = models("llama", tmp_path, 2)
    loras: list[str | None] = ["a", "b", None, "a"]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    found = []
    for n_bytes in (None, 6 * 16 * 2 * 3 * 2 * 8 * 4):  # room for all, and for six pages
        llm = LLM(
            base, {"a": adapters[0], "b": adapters[1]}, dtype="fp32", runner=runner, kv_cache_bytes=n_bytes, max_model_len=70
        )
        found.append(answers(llm, PROMPTS, loras, params))
    assert llm.stats().preemptions > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("runner", RUNNERS)
def test_prefixes_are_found_among_requests_of_the_same_adapter_alone(runner: str, tmp_path: Path) -> None:
    base, adapters, merged = models("llama", tmp_path, 2)
    llm = LLM(base, {"a": adapters[0], "b": adapters[1]}, dtype="fp32", runner=runner)
    prompt = [(3 * j) % 97 for j in range(40)]
    hits = []
    for lora in (None, "a", "b", "a", None, "b"):
        before = llm.stats().prefix_hit_tokens
        (found,) = answers(llm, [prompt], [lora])
        hits.append(llm.stats().prefix_hit_tokens - before)
        decoder = decoder_of("llama") if lora is None else merged["ab".index(lora)]
        assert found == continued(decoder, prompt)
    assert hits == [0, 0, 0, 39, 39, 39]
    llm.unload_lora("a")
    llm.load_lora("a", adapters[1])  # another one of the same name
    before = llm.stats().prefix_hit_tokens
    assert answers(llm, [prompt], ["a"]) == [continued(merged[1], prompt)]
    assert llm.stats().prefix_hit_tokens == before


@pytest.mark.parametrize("runner", RUNNERS)
def test_scores_of_prompts_and_further_answers_are_of_the_adapter(runner: str, tmp_path: Path) -> None:
    """Rows are sorted by adapter for the native step; their logits come back in the order of the step."""
    base, adapters, merged = models("llama", tmp_path, 2)
    llm = LLM(base, {"a": adapters[0], "b": adapters[1]}, dtype="fp32", runner=runner)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0, ignore_eos=True, n=2, logprobs=0)
    outputs = llm.generate(PROMPTS[:2] + PROMPTS[3:], params, lora=["b", "a", "b"])
    for output, decoder in zip(outputs, (merged[1], merged[0], merged[1]), strict=True):
        ids = output.prompt_token_ids + output.outputs[1].token_ids
        with torch.inference_mode():
            exact = decoder(torch.tensor([ids]))[0].log_softmax(-1)
        wanted = [float(exact[i, token]) for i, token in enumerate(ids[1:])]
        assert output.prompt_logprobs is not None
        for answer in output.outputs:
            assert answer.logprobs is not None
            found = [entry.logprob for entry in (*output.prompt_logprobs, *answer.logprobs)]
            assert found == pytest.approx(wanted, abs=1e-4)


def test_the_one_used_longest_ago_makes_room_and_none_that_is_in_use(tmp_path: Path) -> None:
    base, adapters, merged = models("llama", tmp_path, 3)
    named = {str(i): adapter for i, adapter in enumerate(adapters)}
    one = LLM(base, {"0": adapters[0]}, dtype="fp32").stats().adapter_bytes
    llm = LLM(base, named, dtype="fp32", lora_memory_bytes=2 * one)
    assert (llm.stats().adapters, llm.stats().adapters_held, llm.stats().adapter_loads) == (3, 2, 3)
    for i, (hits, evictions) in enumerate([(0, 2), (0, 3), (0, 4)]):  # in turn the worst order: always the other one
        assert answers(llm, [PROMPTS[0]], [str(i)]) == [continued(merged[i], PROMPTS[0])]
        assert (llm.stats().adapter_hits, llm.stats().adapter_evictions) == (hits, evictions)
    assert answers(llm, [PROMPTS[0]], ["2"]) == [continued(merged[2], PROMPTS[0])]
    assert llm.stats().adapter_hits == 1
    # Three adapters at once where two fit: the third waits until one has ended.
    loras: list[str | None] = ["0", "1", "2", "0", None]
    prompts = [*PROMPTS, PROMPTS[0]]
    expected = [
        continued(decoder_of("llama") if n is None else merged[int(n)], ids) for n, ids in zip(loras, prompts, strict=True)
    ]
    assert answers(llm, prompts, loras) == expected
    assert llm.stats().adapter_bytes <= 2 * one


@pytest.mark.parametrize("dtype", [name for name in TORCH_WEIGHTS if library() is not None])
def test_memory_is_what_the_plan_says(dtype: str, tmp_path: Path) -> None:
    base, adapters, _ = models("llama", tmp_path, 2)
    llm = LLM(base, {"a": adapters[0], "b": adapters[1]}, dtype=dtype, runner="native")
    shape = ServingShape(scheme=dtype, adapters=adapters_in(adapters))
    assert llm.stats().adapter_bytes == held_bytes(llm.engine.spec, shape)


def test_requests_under_way_keep_an_adapter_that_is_unloaded(tmp_path: Path) -> None:
    base, adapters, merged = models("llama", tmp_path, 1)
    llm = LLM(base, {"a": adapters[0]}, dtype="fp32")
    core = llm.engine
    for i in range(2):
        core.add_request(str(i), PROMPTS[i], GREEDY, lora="a")
    tokens: dict[str, list[int]] = {"0": [], "1": []}
    core.step()
    llm.unload_lora("a")
    assert core.stats().adapters == 0
    assert core.stats().adapters_held == 1
    with pytest.raises(InputError, match="adapter 'a' is not loaded"):
        core.add_request("2", PROMPTS[0], GREEDY, lora="a")
    tokens = {"0": core.scheduler.requests["0"].tokens, "1": core.scheduler.requests["1"].tokens}
    while core.has_work:
        core.step()
    for i in range(2):
        assert tokens[str(i)][len(PROMPTS[i]) :] == continued(merged[0], PROMPTS[i])
    assert core.stats().adapters_held == 0


def test_files_that_vanish_end_the_request_alone(tmp_path: Path) -> None:
    base, adapters, _ = models("llama", tmp_path, 2)
    one = LLM(base, {"0": adapters[0]}, dtype="fp32").stats().adapter_bytes
    llm = LLM(base, {"0": adapters[0], "1": adapters[1]}, dtype="fp32", lora_memory_bytes=one)
    (adapters[0] / WEIGHTS_NAME).unlink()
    outputs = llm.generate([PROMPTS[0], PROMPTS[1]], GREEDY, lora=["0", None])
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


def changed(directory: Path, **changes: Any) -> None:
    file = directory / CONFIG_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without_weights(directory: Path) -> None:
    (directory / WEIGHTS_NAME).unlink()


def of_other_shape(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_NAME)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(3, 7)}, directory / WEIGHTS_NAME)


def of_integers(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_NAME)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].to(torch.int64)}, directory / WEIGHTS_NAME)


def not_finite(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_NAME)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] * float("nan")}, directory / WEIGHTS_NAME)


def of_another_layer(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS_NAME)
    save_file({name.replace("layers.2", "layers.9"): t for name, t in tensors.items()}, directory / WEIGHTS_NAME)


def of_huge_header(directory: Path) -> None:
    """A gigabyte that the header only claims."""
    (directory / WEIGHTS_NAME).write_bytes((2**30).to_bytes(8, "little") + b"{}")


def of_huge_rank(directory: Path) -> None:
    """A sparse file whose tensors would take four gigabytes."""
    changed(directory, r=2**24, target_modules=["q_proj"])
    sizes = {"A": [2**24, 48], "B": [48, 2**24]}
    header, end = {}, 0
    for which, shape in sizes.items():
        begin, end = end, end + 4 * shape[0] * shape[1]
        name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{which}.weight"
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / WEIGHTS_NAME).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def other_weights(directory: Path) -> None:
    file = directory / "twostroke_adapter.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_fingerprint": "0" * 64}))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (without_weights, InputError, "has no adapter_model.safetensors"),
        (lambda d: (d / CONFIG_NAME).unlink(), InputError, "has no adapter_config.json"),
        (lambda d: changed(d, r=7), CorruptFileError, r"needs \[7, 48\]"),
        (lambda d: changed(d, use_dora=True), ConfigError, "use_dora=True is not supported"),
        (of_other_shape, CorruptFileError, r"has shape \[3, 7\]"),
        (of_integers, CorruptFileError, "is I64; weights must be"),
        (not_finite, CorruptFileError, "not finite"),
        (of_another_layer, CorruptFileError, "fits no matrix"),
        (of_huge_header, CorruptFileError, "declares a header of 1073741824 bytes"),
        (of_huge_rank, ConfigError, "has rank 16777216; adapters of up to 512"),
        (other_weights, CorruptFileError, "was trained on other weights"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_in_one_sentence(
    damage: Any, error: type[InputError], says: str, tmp_path: Path
) -> None:
    base, (good, bad), _ = models("llama", tmp_path, 2)
    llm = LLM(base, {"good": good}, dtype="fp32")
    damage(bad)
    with pytest.raises(error, match=says):
        llm.load_lora("bad", bad)
    assert list(llm.engine.adapters.known) == ["good"]
    assert llm.stats().adapters_held == 1


def test_names_and_room_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapters, _ = models("llama", tmp_path, 1)
    llm = LLM(base, {"a": adapters[0]}, dtype="fp32")
    with pytest.raises(InputError, match="adapter 'a' is loaded already"):
        llm.load_lora("a", adapters[0])
    with pytest.raises(InputError, match=r"adapter 'b' is not loaded\. Loaded: a"):
        llm.unload_lora("b")
    with pytest.raises(InputError, match="adapter 'b' is not loaded"):
        llm.generate([PROMPTS[0]], GREEDY, lora="b")
    for path in ("a\0b", "x" * 5000, tmp_path / WEIGHTS_NAME):
        with pytest.raises(InputError, match=r"has no adapter_config\.json"):
            llm.load_lora("b", path)
    for i in range(255):
        llm.load_lora(str(i), adapters[0])
    with pytest.raises(CapacityError, match="256 adapters are loaded"):
        llm.load_lora("more", adapters[0])
    with pytest.raises(CapacityError, match="Raise --lora-memory-gib"):
        LLM(base, {"a": adapters[0]}, dtype="fp32", lora_memory_bytes=1000)


def test_latent_attention_says_what_it_cannot_serve(tmp_path: Path) -> None:
    base, adapters, _ = models("deepseek_v3", tmp_path, 1)
    with pytest.raises(ConfigError, match="folded into other matrices"):
        LLM(base, {"a": adapters[0]}, dtype="fp32")
    out = adapter_of(base, "deepseek_v3", tmp_path / "out", 3, ("o_proj",))
    assert answers(LLM(base, {"a": out}, dtype="fp32"), [PROMPTS[0]], ["a"]) == [continued(load_model(out), PROMPTS[0])]


def test_a_copy_with_scaled_inputs_takes_its_own_adapters_alone(tmp_path: Path) -> None:
    base, (adapter, _), _ = models("llama", tmp_path, 2)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {SCALED_INPUTS: True}))
    llm = LLM(base, {"own": adapter}, dtype="fp32")
    (adapter / OWN_NAME).unlink()
    changed(adapter, base_model_name_or_path="somewhere/else")
    with pytest.raises(ConfigError, match="rounded with scaled inputs"):
        llm.load_lora("other", adapter)
    changed(adapter, base_model_name_or_path=f"hub/{base.name}")
    llm.load_lora("trained on the copy", adapter)


@pytest.mark.skipif(library() is None, reason="needs the native library")
def test_a_step_without_an_adapter_hands_none_to_the_library(tmp_path: Path) -> None:
    base, adapters, _ = models("llama", tmp_path, 1)
    llm = LLM(base, {"a": adapters[0]}, dtype="fp32", runner="native")
    answers(llm, [PROMPTS[0]], ["a"])
    batch: Any = llm.engine._runner._batch  # type: ignore[union-attr]
    assert batch.adapters
    answers(llm, [PROMPTS[0]], [None])
    assert not batch.adapters
    assert isinstance(llm.engine.adapters.get("a"), Adapter)
    held = llm.engine.adapters.get("a").held
    assert isinstance(held, NativeAdapter)
    assert sum(at.n > 0 for at in held._at) == sum(isinstance(op, p.Adaptable) for op in llm.engine.plan.ops)
