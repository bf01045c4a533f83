from __future__ import annotations

import inspect

import pytest
import torch

from small_models import EVERY, SPECS, decoder_of
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.families import FAMILIES
from twostroke.engine import batch, interpreter, kv_pool, lowering, plan
from twostroke.engine import plan as p
from twostroke.engine.batch import BatchBuilder
from twostroke.engine.interpreter import Buffers, TorchInterpreter
from twostroke.engine.kv_pool import KVPool
from twostroke.engine.lowering import interleaved, lower
from twostroke.model.decoder import Decoder
from twostroke.planner.work.weights import weights_bytes
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import SchedulerConfig

PROMPTS = ([5, 9, 3, 44, 7, 8, 90, 17, 33, 2, 60, 61, 62, 1, 4, 4, 4, 12, 13, 14, 15, 16, 71], [30, 31, 32, 5, 6], [77])


class Rig:
    """A plan, a pool and a scheduler, stepped by hand; remembers hidden states and logits by (request, position)."""

    def __init__(
        self, decoder: Decoder, weights: str = "fp32", token_budget: int = 16, page_tokens: int = 4, max_model_len: int = 128
    ) -> None:
        config = SchedulerConfig(token_budget, 4, page_tokens, 64, max_model_len)
        self.plan = lower(decoder.spec, decoder.state_dict(), weights)
        self.pool = KVPool(decoder.spec, config.n_pages, page_tokens, self.plan.dtype)
        self.scheduler = Scheduler(config)
        self.builder = BatchBuilder(decoder.spec, config, self.plan.dtype)
        self.interpreter = TorchInterpreter(self.plan, self.pool, self._watch)
        self.hidden: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self.where: list[tuple[str, int]] = []

    def _watch(self, op: p.Op, buffers: Buffers) -> None:
        ends = isinstance(op, p.OutProjectionAdd | p.MlpDownAdd) and op.ends_block
        if ends or isinstance(op, p.Embed | p.ExpertsAdd):
            for place, row in zip(self.where, buffers.residual.clone(), strict=True):
                self.hidden.setdefault(place, []).append(row)

    def add(self, name: str, prompt: list[int], max_tokens: int = 6) -> None:
        self.scheduler.add(Request(name, prompt, SamplingParams(max_tokens=max_tokens)))

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.where = [
            (r.id, start + i) for r, start, n in zip(step.requests, step.starts, step.counts, strict=True) for i in range(n)
        ]
        logits = self.interpreter.run(self.builder.build(step, all_rows=True))
        self.logits |= dict(zip(self.where, logits, strict=True))
        sampled = []
        for i, request in enumerate(step.requests):
            last = (request.id, step.starts[i] + step.counts[i] - 1)
            sampled.append(int(self.logits[last].argmax()) if step.samples(i) else None)
        self.finished = self.scheduler.update(step, sampled)


@torch.inference_mode()
def reference(decoder: Decoder, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The decoder's residual stream after the embedding and each block, and its logits, (T, ·) each."""
    states: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: states.append(out[0])) for block in decoder.blocks]
    hooks.append(decoder.blocks[0].register_forward_pre_hook(lambda _m, args: states.append(args[0][0])))
    logits = decoder(torch.tensor([tokens]))[0]
    for hook in hooks:
        hook.remove()
    return states, logits


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("block", [128, 5])
def test_the_plan_computes_what_the_decoder_computes_block_by_block(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests of different lengths in one mixed batch, prompts in chunks, decoded six tokens on."""
    monkeypatch.setattr(batch, "PREFILL_QUERIES", block)
    decoder = decoder_of(name)
    rig = Rig(decoder)
    for i, prompt in enumerate(PROMPTS):
        rig.add(f"r{i}", list(prompt))
        rig.step()
    requests = dict(rig.scheduler.requests)
    while rig.scheduler.has_work:
        rig.step()
    for i in range(len(PROMPTS)):
        tokens = requests[f"r{i}"].tokens if f"r{i}" in requests else None
        assert tokens is not None
        states, logits = reference(decoder, tokens[:-1])
        for position in range(len(tokens) - 1):
            found = rig.hidden[f"r{i}", position]
            assert len(found) == decoder.spec.n_layers + 1
            for block, state in enumerate(states):
                # fp32 sums in another order, through three blocks
                torch.testing.assert_close(found[block], state[position], rtol=1e-4, atol=2e-4)
            torch.testing.assert_close(rig.logits[f"r{i}", position], logits[position], rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", 200)])
def test_a_long_prompt_in_chunks_and_blocks_is_the_decoders(name: str, window: int | None) -> None:
    decoder = decoder_of(name, max_positions=700, sliding_window=window)
    prompt = torch.randint(0, 97, (620,), generator=torch.Generator().manual_seed(0)).tolist()
    rig = Rig(decoder, token_budget=300, page_tokens=16, max_model_len=640)
    rig.add("a", prompt, max_tokens=3)
    while rig.scheduler.has_work:
        rig.step()
    _, logits = reference(decoder, prompt)
    found = torch.stack([rig.logits["a", i] for i in range(len(prompt))])
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-3)  # fp32, sums of up to 620 terms in another order


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_stays_within_its_rounding_of_fp32(name: str) -> None:
    decoder = decoder_of(name)
    logits = {}
    for weights in ("fp32", "bf16", "int8"):
        rig = Rig(decoder, weights, token_budget=64)
        rig.add("a", list(PROMPTS[0]), max_tokens=1)
        rig.step()
        logits[weights] = torch.stack([rig.logits["a", i] for i in range(len(PROMPTS[0]))])
    scale = float(logits["fp32"].std())
    assert float((logits["bf16"] - logits["fp32"]).abs().mean()) <= 0.03 * scale  # 2⁻⁸ a rounding, tens of them in a row
    assert float((logits["int8"] - logits["fp32"]).abs().mean()) <= 0.10 * scale


def test_no_part_of_the_engine_knows_a_family_by_name() -> None:
    for module in (batch, interpreter, kv_pool, lowering, plan):
        source = inspect.getsource(module)
        assert not [family for family in FAMILIES if f'"{family}"' in source]


def test_interleaving_puts_the_halves_of_a_head_side_by_side() -> None:
    assert interleaved(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_missing_tensor_is_named() -> None:
    state = dict(decoder_of("llama").state_dict())
    del state["blocks.1.mlp.down.weight"]
    with pytest.raises(CorruptFileError, match=r"blocks\.1\.mlp\.down\.weight"):
        lower(SPECS["llama"], state)


def test_an_unknown_way_to_hold_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="int3"):
        lower(SPECS["llama"], decoder_of("llama").state_dict(), "int3")


@pytest.mark.parametrize("name", SPECS)
def test_the_bytes_of_weights_are_those_of_the_parameters(name: str) -> None:
    decoder = decoder_of(name)
    plan = lower(decoder.spec, decoder.state_dict(), "fp32")
    total = sum(parameter.nbytes for parameter in decoder.parameters())
    assert plan.weights_bytes == total == weights_bytes(decoder.spec, "fp32")
    looked_up = [p for n, p in decoder.named_parameters() if n == "position_embed.weight"]
    looked_up += [] if decoder.spec.tied_embeddings else [decoder.embed.weight]
    assert plan.step_bytes == total - sum(p.nbytes for p in looked_up)
    assert lower(decoder.spec, decoder.state_dict(), "bf16").weights_bytes == weights_bytes(decoder.spec, "bf16")
    int8 = lower(decoder.spec, decoder.state_dict(), "int8")
    matrices = [op.matrix for op in int8.ops if hasattr(op, "matrix")]
    twice = sum(m.n_rows * m.n_columns for m in matrices if getattr(m, "weight", None) is not None and m.held_bytes > m.n_bytes)
    assert int8.weights_bytes - twice == weights_bytes(decoder.spec, "int8")
