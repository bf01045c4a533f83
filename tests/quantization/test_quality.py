"""int8 must not cost quality on text that a model knows: perplexity through the engine's own products, each kernel apart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.core.crossovers import Crossovers
from twostroke.core.spec import ModelSpec
from twostroke.engine.batch import BatchBuilder
from twostroke.engine.interpreter import TorchInterpreter
from twostroke.engine.kv_pool import KVPool
from twostroke.engine.lowering import lower
from twostroke.interop.import_model import import_model
from twostroke.kernels.features import has_w8a8_linear
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_state
from twostroke.quantization.convert import quantize_model
from twostroke.quantization.load import load_any_state
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import SchedulerConfig

INTEGERS, WEIGHT_ONLY = Crossovers(int8_weight_only_max_macs=0), Crossovers(int8_weight_only_max_macs=1e12)


def nats_per_token(
    spec: ModelSpec, state: Mapping[str, Tensor], weights: str, sequences: list[list[int]], crossovers: Crossovers | None = None
) -> float:
    """Mean −ln p of each token but the first of each sequence, as the engine computes it."""
    plan = lower(spec, state, weights, crossovers)
    config = SchedulerConfig(512, 4, 16, 200, 512)
    pool, builder = KVPool(spec, 200, 16, plan.dtype), BatchBuilder(spec, config, plan.dtype)
    interpreter = TorchInterpreter(plan, pool)
    total, n = 0.0, 0
    for sequence in sequences:
        scheduler = Scheduler(config)
        scheduler.add(Request("a", sequence, SamplingParams(max_tokens=1)))
        logits = interpreter.run(builder.build(scheduler.schedule(), all_rows=True))
        total += float(F.cross_entropy(logits[:-1], torch.tensor(sequence[1:]), reduction="sum"))
        n += len(sequence) - 1
    return total / n


@pytest.fixture(scope="module")
def learned() -> tuple[ModelSpec, dict[str, Tensor], list[list[int]]]:
    """A small model that has learned a text of its own, byte by byte."""
    torch.manual_seed(0)
    sentence = "a model lives in two phases that share one architecture and little else so we measure both before we speak"
    words = sentence.split()
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(0, len(words), (600,), generator=generator).tolist()
    text = " ".join(words[i] for i in order).encode()
    spec = ModelSpec("llama", 128, 2, 64, 4, 2, 16, 160, 256, tied_embeddings=True)
    decoder = Decoder(spec).train()
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=4e-3)
    data = torch.tensor(list(text))
    for _ in range(120):
        starts = torch.randint(0, len(data) - 65, (8,), generator=generator)
        batch = torch.stack([data[s : s + 65] for s in starts])
        loss = F.cross_entropy(decoder(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.2  # it knows the words; uniform bytes would be 4.9
    state = {name: p.detach() for name, p in decoder.eval().named_parameters()}
    return spec, state, [list(text[i : i + 200]) for i in range(0, 1600, 200)]


@pytest.fixture(scope="module")
def stories(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = assets / "weights" / "stories260K" / "stories260K.bin"
    if not source.is_file():
        pytest.skip(f"the stories260K weights are not at {source}")
    directory = tmp_path_factory.mktemp("stories") / "model"
    import_model(str(source), directory)
    return directory


@pytest.mark.parametrize("kernel", [WEIGHT_ONLY, INTEGERS], ids=["weight-only", "w8a8"])
def test_int8_keeps_the_perplexity_of_a_model_trained_here(
    learned: tuple[ModelSpec, dict[str, Tensor], list[list[int]]], kernel: Crossovers
) -> None:
    spec, state, text = learned
    exact = nats_per_token(spec, state, "fp32", text)
    ratio = math.exp(nats_per_token(spec, state, "int8", text, kernel) - exact)
    print(f"perplexity {math.exp(exact):.4f} in fp32, ratio {ratio:.5f} in int8")
    assert ratio <= 1.01


def test_fp8_keeps_the_perplexity_of_a_model_trained_here(
    learned: tuple[ModelSpec, dict[str, Tensor], list[list[int]]],
) -> None:
    spec, state, text = learned
    ratio = math.exp(nats_per_token(spec, state, "fp8", text) - nats_per_token(spec, state, "fp32", text))
    print(f"perplexity ratio {ratio:.5f} in fp8")
    assert ratio <= 1.01


def test_eight_bits_keep_the_perplexity_of_stories260k(stories: Path, assets: Path, tmp_path: Path) -> None:
    """Measured ratios to fp32 on eight stories: bf16 1.0011, weight-only 0.9989, W8A8 1.0003, fp8 1.0039."""
    from twostroke.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(stories)
    texts = json.loads((assets / "corpora" / "text" / "tinystories_1000.json").read_text(encoding="utf-8"))
    sequences = [[1, *tokenizer.encode(text, add_special_tokens=False).ids[:300]] for text in texts[:8]]
    spec, state = load_state(stories)
    exact = nats_per_token(spec, state, "fp32", sequences)
    assert math.exp(exact) < 12  # it knows such stories
    quantize_model(stories, tmp_path / "int8")
    quantised = load_any_state(tmp_path / "int8")[1]
    ratios = {"bf16": math.exp(nats_per_token(spec, state, "bf16", sequences) - exact)}
    for name, kernel in (("weight-only", WEIGHT_ONLY), ("w8a8", INTEGERS)):
        ratios[name] = math.exp(nats_per_token(spec, quantised, "int8", sequences, kernel) - exact)
    quantize_model(stories, tmp_path / "fp8", "fp8")
    ratios["fp8"] = math.exp(nats_per_token(spec, load_any_state(tmp_path / "fp8")[1], "fp8", sequences) - exact)
    print(f"perplexity {math.exp(exact):.4f} in fp32, ratios {ratios}")
    assert ratios["fp8"] <= 1.01
    assert ratios["bf16"] <= 1.005
    assert ratios["weight-only"] <= 1.01
    assert ratios["w8a8"] <= 1.01 or not has_w8a8_linear()
