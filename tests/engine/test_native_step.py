"""The native step against the decoder, against the torch interpreter of the same plan, and against itself in other batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import EVERY, SPECS, decoder_of, saved
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.spec import RopeSpec
from twostroke.engine.batch import BatchBuilder
from twostroke.engine.core import EngineCore
from twostroke.engine.interpreter import TorchInterpreter
from twostroke.engine.lowering import lower
from twostroke.engine.native_runner import NativeRunner
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.kernels.native_library import holding, library, set_target, why_absent
from twostroke.model.decoder import Decoder
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep, SchedulerConfig

pytestmark = pytest.mark.skipif(library() is None, reason=why_absent())

PROMPTS = ([5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 1, 4, 4, 4, 12, 13, 14, 15, 16, 71], [30, 31, 32, 5, 6], [77])
SIZES = {"max_positions": 700}
LONGROPE = RopeSpec(
    scaling="longrope", original_max_positions=64, magnitude=1.2, short_factors=(1.0, 1.1, 1.2, 1.3),
    long_factors=(1.0, 1.5, 2.0, 2.5),
)  # fmt: skip


def long_prompt(n: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


class Rig:
    """A native plan, a cache and a scheduler stepped by hand: greedy, logits and residual streams by (request, position)."""

    def __init__(
        self,
        decoder: Decoder,
        weights: str = "fp32",
        kv: str = "fp32",
        token_budget: int = 16,
        page_tokens: int = 16,
        n_threads: int = 2,
        head: str | None = None,
    ) -> None:
        self.spec, self.n_threads = decoder.spec, n_threads
        self.config = SchedulerConfig(token_budget, 4, page_tokens, -(-2800 // page_tokens), decoder.spec.max_positions)
        self.plan = lower(decoder.spec, decoder.state_dict(), weights, native=True, head=head)
        self.pool = self.make_pool(kv)
        self.scheduler = Scheduler(self.config)
        self.runner = NativeRunner(self.plan, self.pool, self.config)
        self.states: dict[tuple[str, int], torch.Tensor] = {}
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.requests: dict[str, Request] = {}

    def make_pool(self, kv: str) -> TiledKVPool:
        return TiledKVPool(self.spec, self.config.n_pages, self.config.page_tokens, kv)

    def add(self, name: str, prompt: list[int], max_tokens: int = 6) -> None:
        self.requests[name] = Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        self.scheduler.add(self.requests[name])

    def compute(self, step: ScheduledStep) -> torch.Tensor:
        trace = torch.full((self.spec.n_layers + 1, step.n_tokens, self.spec.d_model), float("nan"))
        logits = self.runner.run(step, n_threads=self.n_threads, all_rows=True, trace=trace)
        for i, place in enumerate(places(step)):
            self.states[place] = trace[:, i].clone()
        return logits.clone()

    def step(self) -> None:
        step = self.scheduler.schedule()
        logits = self.compute(step)
        self.logits |= dict(zip(places(step), logits, strict=True))
        last = [(r.id, s + n - 1) for r, s, n in zip(step.requests, step.starts, step.counts, strict=True)]
        sampled = [int(self.logits[p].argmax()) if step.samples(i) else None for i, p in enumerate(last)]
        self.scheduler.update(step, sampled)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def row(self, name: str) -> torch.Tensor:
        """Logits of every position of a request that was computed."""
        return torch.stack([self.logits[name, i] for i in range(len(self.requests[name].tokens) - 1)])


class TwinRig(Rig):
    """Computes each step by the torch interpreter too, from a cache of its own."""

    def __init__(self, *args: Any, kv: str = "fp32", **kwargs: Any) -> None:
        super().__init__(*args, kv=kv, **kwargs)
        self.builder = BatchBuilder(self.spec, self.config, self.plan.dtype)
        self.interpreter = TorchInterpreter(self.plan, self.make_pool(kv))
        self.differences: list[torch.Tensor] = []

    def compute(self, step: ScheduledStep) -> torch.Tensor:
        found = super().compute(step)
        expected = self.interpreter.run(self.builder.build(step, all_rows=True))
        self.differences.append(((found - expected).abs() / expected.std()).flatten())
        return found


def places(step: ScheduledStep) -> list[tuple[str, int]]:
    return [(r.id, s + i) for r, s, n in zip(step.requests, step.starts, step.counts, strict=True) for i in range(n)]


@torch.inference_mode()
def reference(decoder: Decoder, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's residual stream after the embedding and each block (T, blocks + 1, E), and its logits."""
    states: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: states.append(out[0])) for block in decoder.blocks]
    hooks.append(decoder.blocks[0].register_forward_pre_hook(lambda _m, args: states.append(args[0][0])))
    logits = decoder(torch.tensor([tokens]))[0]
    for hook in hooks:
        hook.remove()
    return torch.stack(states, dim=1), logits


@pytest.fixture
def best_target() -> Iterator[None]:
    yield
    set_target(holding()[-1])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_it_computes_what_the_decoder_computes_block_by_block(name: str, n_threads: int) -> None:
    """Three requests of different lengths in one mixed batch, prompts in chunks, decoded six tokens on."""
    decoder = decoder_of(name)
    rig = Rig(decoder, n_threads=n_threads, page_tokens=4 if n_threads == 1 else 16)
    for i, prompt in enumerate(PROMPTS):
        rig.add(f"r{i}", list(prompt))
        rig.step()
    rig.run()
    for i in range(len(PROMPTS)):
        tokens = rig.requests[f"r{i}"].tokens
        states, logits = reference(decoder, tokens[:-1])
        found = torch.stack([rig.states[f"r{i}", position] for position in range(len(tokens) - 1)])
        torch.testing.assert_close(found, states, rtol=1e-4, atol=2e-4)  # fp32 sums in another order, through three blocks
        torch.testing.assert_close(rig.row(f"r{i}"), logits, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 200}),
        ("mistral", {"sliding_window": 15}),
        ("qwen3", {"head_dim": 80}),
        ("gpt2", {"head_dim": 13}),
        ("llama", {"n_heads": 50, "n_kv_heads": 1}),
        ("gemma3_text", {"sliding_window": 100}),
        ("cohere2", {"sliding_window": 100}),
        ("granite", {}),
        ("llama", {"rope": LONGROPE}),
        ("qwen2_moe", {}),
        ("glm4_moe", {}),
        ("gpt_oss", {"sliding_window": 100}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {}),
    ],
)
def test_long_prompts_are_the_decoders(name: str, changes: dict[str, Any]) -> None:
    """Chunks of many rows, several spans of keys, windows that begin inside a block, odd and wide heads, more heads in a group
    than rows in a task; of experts more rows than lie between two barriers."""
    decoder = decoder_of(name, **SIZES | changes)
    rig = Rig(decoder, token_budget=300 if decoder.spec.moe is None else 620, page_tokens=16)
    rig.add("a", long_prompt(620), max_tokens=3)
    rig.add("b", long_prompt(70, seed=1), max_tokens=3)
    rig.run()
    for name in ("a", "b"):
        _, logits = reference(decoder, rig.requests[name].tokens[:-1])
        torch.testing.assert_close(
            rig.row(name), logits, rtol=1e-4, atol=2e-3
        )  # fp32, sums of up to 620 terms in another order


@pytest.mark.parametrize("name", [*SPECS, "gemma2", "granite", "glm4", "qwen2_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    ("weights", "kv", "limit"),
    [
        # Queries and softmax weights are rounded to bf16 here and not there, 2⁻⁹ each, through three blocks of lively weights;
        # where activations are in 8 bits such a difference moves some of them to the next code, 1/127 of their row's largest.
        ("bf16", "bf16", 0.02),
        ("int8_weight_only", "bf16", 0.02),
        ("int8", "bf16", 0.05),
        ("int8", "int8", 0.05),
        ("bf16", "int4", 0.10),  # a code of 4 bits that moves is a fifteenth of its key
        ("int4", "bf16", 0.05),
    ],
)
def test_every_format_is_near_the_interpreter_of_the_same_plan(name: str, weights: str, kv: str, limit: float) -> None:
    moe = EVERY[name].moe
    # All experts are chosen: a difference in the last bit would make some rows choose others.
    changes = {} if moe is None else {"moe": replace(moe, top_k=moe.n_experts, n_groups=1, top_groups=1)}
    rig = TwinRig(decoder_of(name, **changes), weights, kv=kv)
    for i, prompt in enumerate(PROMPTS):
        rig.add(f"r{i}", list(prompt))
    rig.run()
    assert float(torch.cat(rig.differences).mean()) <= limit


def test_fp32_agrees_with_the_interpreter_to_its_own_rounding() -> None:
    rig = TwinRig(decoder_of("qwen2"), token_budget=64)
    for i, prompt in enumerate(PROMPTS):
        rig.add(f"r{i}", list(prompt))
    rig.run()
    assert float(torch.cat(rig.differences).max()) <= 1e-4


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"head_dim": 64}),
        ("gemma2", {"head_dim": 64, "sliding_window": 90}),
        ("mistral", {"head_dim": 96, "sliding_window": 90}),
        ("qwen3", {"head_dim": 160}),
        ("llama", {"head_dim": 32, "n_heads": 50, "n_kv_heads": 1}),
    ],
)
def test_attention_by_matrix_tiles_is_near_the_interpreters(name: str, changes: dict[str, Any], kv: str) -> None:
    """Head dimensions of whole tiles, several spans of keys; pages side by side and not."""
    # Behind an int4 cache differences move codes of the next layer's keys, by a fifteenth of each.
    decoder = decoder_of(name, **SIZES | changes | ({"n_layers": 1} if kv == "int4" else {}))
    for page_tokens in (16, 24):
        rig = TwinRig(decoder, "bf16", kv=kv, token_budget=256, page_tokens=page_tokens)
        rig.add("a", long_prompt(330), max_tokens=3)
        rig.add("b", long_prompt(300, seed=1), max_tokens=3)
        rig.run()
        # As in test_every_format_is_near_the_interpreter_of_the_same_plan.
        assert float(torch.cat(rig.differences).mean()) <= (0.02 if kv == "bf16" else 0.03)


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4", "fp32"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 100}),
        ("qwen3", {}),
        ("gpt2", {}),
        ("llama", {"head_dim": 64}),  # AMX's tiles
        ("mistral", {"head_dim": 96, "sliding_window": 100}),
    ],
)
def test_w8a8_does_not_depend_on_the_batch_by_a_single_bit(name: str, changes: dict[str, Any], kv: str) -> None:
    """The same 330 tokens: alone at once on one thread; in chunks among others on two; in pages of another size."""
    decoder = decoder_of(name, **SIZES | changes)
    alone = Rig(decoder, "int8", kv, token_budget=512, n_threads=1, head="int8")
    alone.add("a", long_prompt(330))
    alone.run()
    for budget, page_tokens, n_threads, others in ((45, 16, 2, 3), (200, 24, 2, 2), (7, 5, 1, 1)):
        rig = Rig(decoder, "int8", kv, token_budget=budget, page_tokens=page_tokens, n_threads=n_threads, head="int8")
        for i in range(others):
            rig.add(f"other{i}", long_prompt(20 + 90 * i, seed=i + 1), max_tokens=12)
        rig.step()
        rig.add("a", long_prompt(330))
        rig.run()
        assert rig.requests["a"].tokens == alone.requests["a"].tokens
        assert torch.equal(rig.row("a"), alone.row("a"))


@pytest.mark.parametrize(("weights", "kv"), [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "int4")])
def test_other_instruction_sets_agree(weights: str, kv: str, best_target: None) -> None:
    decoder = decoder_of("qwen3", **SIZES | ({"head_dim": 72} if kv == "int4" else {}))
    found = []
    for target in holding():
        set_target(target)
        rig = Rig(decoder, weights, kv, token_budget=128)
        rig.add("a", long_prompt(150), max_tokens=1)
        rig.run()
        found.append(rig.row("a"))
    for other in found[:-1]:
        # bf16: each target sums in another order, so that now and then a value is rounded to its neighbour, 2⁻⁸ away.
        assert float((other - found[-1]).abs().mean() / found[-1].std()) <= (1e-5 if kv == "fp32" else 0.02)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 96])
def test_a_cache_in_four_bits_holds_what_its_reference_holds(head_dim: int) -> None:
    """In blocks of 8, 32 and 64; the first layer's keys and values are the same but for the order of sums."""
    rig = TwinRig(decoder_of("llama", head_dim=head_dim), kv="int4", token_budget=64)
    rig.add("a", long_prompt(50), max_tokens=1)
    rig.step()
    own, reference = rig.pool, rig.interpreter.pool
    assert isinstance(reference, TiledKVPool)
    for name in ("keys", "values"):
        found, expected = getattr(own, name)[0], getattr(reference, name)[0]
        assert bool(expected.any())
        assert float((found != expected).float().mean()) < 0.01  # a last bit moves few to the next code
    for name in ("key_scales", "value_scales"):
        torch.testing.assert_close(getattr(own, name)[0], getattr(reference, name)[0], rtol=2**-7, atol=1e-3)


def test_only_the_rows_asked_for_have_logits() -> None:
    decoder = decoder_of("llama")
    rig, other = Rig(decoder, token_budget=64), Rig(decoder, token_budget=64)
    for r in (rig, other):
        for i, prompt in enumerate(PROMPTS):
            r.add(f"r{i}", list(prompt))
    step, same = rig.scheduler.schedule(), other.scheduler.schedule()
    every = rig.runner.run(step, all_rows=True).clone()
    ends = torch.tensor(step.counts).cumsum(0) - 1
    assert torch.equal(other.runner.run(same), every[ends])
    assert torch.equal(other.runner.run(same, torch.tensor([3, 1, 0])), every[[3, 1, 0]])
    assert other.runner.run(same, torch.tensor([], dtype=torch.int64)).shape == (0, 97)


def test_the_best_token_of_each_row_comes_with_the_logits() -> None:
    """In both ways to share out work, the first of equals, and NaN for a row that holds what is no number."""
    decoder = decoder_of("llama", **SIZES)
    with torch.no_grad():
        decoder.head.weight[60] = decoder.head.weight[30]  # so they tie in every row
        decoder.embed.weight[96] = float("inf")
    for prompts in ([[5, 6, 96, 7], [8, 9]], [long_prompt(90)]):
        rig = Rig(decoder, token_budget=128)
        for i, prompt in enumerate(prompts):
            rig.add(f"r{i}", prompt)
        logits = rig.runner.run(rig.scheduler.schedule(), n_threads=2, all_rows=True)
        values, tokens = rig.runner.best_of(len(logits))
        finite = torch.isfinite(logits).all(dim=1)
        assert torch.equal(torch.isfinite(values), finite)
        expected = logits[finite].max(dim=1)
        assert torch.equal(values[finite], expected.values)
        assert torch.equal(tokens[finite], (logits[finite] == expected.values[:, None]).int().argmax(dim=1))
        assert not bool((tokens == 60).any())


def test_what_a_given_back_page_holds_does_not_matter() -> None:
    """Pages behind the window may be another request's by now, and hold what is no number while that one fails."""
    decoder = decoder_of("mistral", sliding_window=20, **SIZES)
    rigs = [Rig(decoder, "int8", "bf16", token_budget=128) for _ in range(2)]
    for rig in rigs:
        rig.add("a", long_prompt(100), max_tokens=12)
        rig.step()
    for layer in range(3):
        first = 16 * rigs[1].requests["a"].pages[4]  # positions 64 to 79; the next query sees those from 81 on
        rigs[1].pool.write(layer, torch.arange(first, first + 16), torch.full((4, 16, 16), float("nan")))
    for rig in rigs:
        rig.run()
    assert torch.equal(rigs[0].row("a"), rigs[1].row("a"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("head_dim", "page_tokens"), [(8, 16), (7, 5)])
def test_the_cache_gives_back_what_was_written(dtype: str, head_dim: int, page_tokens: int) -> None:
    spec = SPECS["gpt2"].with_(head_dim=head_dim, n_kv_heads=2)
    pool = TiledKVPool(spec, 6, page_tokens, dtype)
    heads = torch.randn((4, 3, head_dim), generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([page_tokens + 1, page_tokens + 2, 4 * page_tokens])
    pool.write(1, slots, heads)
    # int4: a transformed number is at most √8 times the largest, off by 1/15 of it, and √8 such errors may meet.
    tolerance = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 254, "int4": 8 / 15}[dtype]
    for first, index in ((page_tokens + 1, slice(0, 2)), (4 * page_tokens, slice(2, 3))):
        keys, values = pool.run(1, first, index.stop - index.start)
        largest = heads.abs().amax(dim=2, keepdim=True)[:, index]
        assert bool(((torch.cat((keys, values))[:, 0] - heads[:, index]).abs() <= tolerance * largest + 1e-7).all())
    pool.copy([(1, 3), (4, 0)])
    before = pool.gather(1, torch.tensor([1, 4]), 2)
    assert all(torch.equal(a, b) for a, b in zip(before, pool.gather(1, torch.tensor([3, 0]), 2), strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_dtype": "int8"}, {"dtype": "int8", "head_dtype": "int8"}, {"dtype": "int4"}, {"dtype": "int8_weight_only"}],
)
def test_the_engine_runs_natively_and_by_torch(tmp_path: Path, options: dict[str, str]) -> None:
    directory = saved("llama", tmp_path / "m")[1]
    tokens = {}
    for runner in ("native", "torch") if "dtype" not in options else ("native",):
        core = EngineCore(directory, EngineSettings(**{"dtype": "fp32", "runner": runner, "n_threads": 1} | options))  # type: ignore[arg-type]
        assert core.runner == runner
        core.add_request("a", [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        found: list[int] = []
        while core.has_work:
            found += [token for event in core.step() for token in event.token_ids]
        tokens[runner] = found
        assert len(found) == 12
        assert core.stats().decode_bytes > 11 * core.plan.step_bytes
    assert len({tuple(t) for t in tokens.values()}) == 1


def test_a_plan_for_torch_is_refused() -> None:
    decoder = decoder_of("llama")
    plan = lower(decoder.spec, decoder.state_dict(), "fp32")
    config = SchedulerConfig(16, 4, 16, 64, 128)
    with pytest.raises(ConfigError, match="native=True"):
        NativeRunner(plan, TiledKVPool(decoder.spec, 64, 16, "fp32"), config)


def test_stories260k_continues_exactly(assets: Path, tmp_path: Path) -> None:
    """200 of 200 greedy tokens of a real model, as every correct engine continues it."""
    from twostroke.interop.import_model import import_model

    source = assets / "weights" / "stories260K"
    if not source.is_dir():
        pytest.skip(f"the stories260K weights are not in {source}")
    import_model(str(source / "stories260K.bin"), tmp_path / "m")
    expected = json.loads((source / "expected_greedy_200_ids.json").read_text())
    core = EngineCore(tmp_path / "m", EngineSettings(dtype="fp32", runner="native", n_threads=2))
    core.add_request("a", [expected["bos"]], SamplingParams(temperature=0.0, max_tokens=expected["steps"], ignore_eos=True))
    found: list[int] = []
    while core.has_work:
        found += [token for event in core.step() for token in event.token_ids]
    assert found == expected["greedy_token_ids"][-200:]
