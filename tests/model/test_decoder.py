"""The decoder against transformers, and the properties that training and scoring rely on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

from hf_models import (
    CASES,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    SIZES,
    TOLERANCE,
    V,
    decoder_error,
    random_tokens,
    relative_error,
    save_reference,
)
from small_models import FEATURES
from twostroke.core.errors import InputError
from twostroke.core.spec import ModelSpec, RopeSpec
from twostroke.model.attention import attention_mask, explicit_attention, prefers_explicit
from twostroke.model.decoder import Block, Decoder
from twostroke.model.load import load_model
from twostroke.model.rope import inverse_frequencies, rope_tables, rotate

SPEC = ModelSpec("llama", V, 2, 64, 4, 2, 16, 96, 128)

TRAINED = {
    name: spec.with_(
        head_dim=32 if spec.mla is None else spec.head_dim,
        departures=replace(spec.departures, attention_scale=spec.departures.attention_scale and 0.15),
        moe=spec.moe and replace(spec.moe, top_k=spec.moe.n_experts, n_groups=1, top_groups=1),
    )
    for name, spec in FEATURES.items()
}
"""All experts are chosen: rounding to bf16 would make some tokens choose others."""

GPT2 = ModelSpec(
    "gpt2", V, 2, 64, 4, 4, 16, 96, 48, norm="layernorm", positions="learned", mlp="gelu", activation="gelu_tanh",
    qkv_bias=True, attn_out_bias=True, mlp_bias=True, tied_embeddings=True,
)  # fmt: skip


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions, documents) of one row that holds documents of these lengths."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].int()
    return positions, documents


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case: str, tmp_path: Path) -> None:
    assert decoder_error(save_reference(case, tmp_path), tmp_path) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama", "llama-llama3-rope", "mistral", "qwen2-upper-layers-windowed", "qwen3", "gpt2"])
@torch.no_grad()
def test_packed_documents_give_the_logits_of_separate_documents(case: str, tmp_path: Path) -> None:
    theirs = save_reference(case, tmp_path)
    ours = load_model(tmp_path)
    lengths = [1, 13, 3, 20]
    tokens = random_tokens(n_rows=1, n_tokens=sum(lengths))
    together = ours(tokens, *packed(lengths))
    start = 0
    for length in lengths:
        alone = tokens[:, start : start + length]
        here = together[:, start : start + length]
        assert relative_error(here, ours(alone)) <= 1e-5  # the same arithmetic with other summands masked
        assert relative_error(here, theirs(alone).logits) <= TOLERANCE
        start += length


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3-one-layer-windowed", "gpt2"])
@torch.no_grad()
def test_a_token_never_changes_what_comes_before_it(case: str, tmp_path: Path) -> None:
    save_reference(case, tmp_path)
    ours = load_model(tmp_path)
    tokens = random_tokens(n_rows=1)
    changed = tokens.clone()
    changed[0, 25] = (changed[0, 25] + 1) % V
    before, after = ours(tokens), ours(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25], after[:, 25])


@torch.no_grad()
def test_a_window_hides_exactly_the_keys_beyond_it() -> None:
    window = 5
    ours = Decoder(SPEC.with_(family="mistral", n_layers=1, sliding_window=window)).eval()
    tokens = random_tokens(n_rows=1)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % V
    moved = (ours(tokens) - ours(changed)).abs().amax(dim=(0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == list(range(10, 10 + window))


@pytest.mark.parametrize("parameters", [LINEAR_ROPE, LLAMA3_ROPE, {"rope_type": "default", "rope_theta": 1e6}])
def test_rope_frequencies_are_those_of_transformers(parameters: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from twostroke.core.families import spec_from_config

    config = SIZES | {"model_type": "llama", "rope_parameters": parameters, "head_dim": 64}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq
    torch.testing.assert_close(inverse_frequencies(spec_from_config(config).rope, 64), theirs, rtol=1e-7, atol=0)


def test_rotation_depends_on_the_distance_alone_and_keeps_lengths() -> None:
    spec = SPEC.with_(rope=RopeSpec(theta=100.0))
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x, *(t.double() for t in rope_tables(spec, torch.tensor([[position]]))))

    near, far = (at(q, 9) * at(k, 4)).sum(), (at(q, 109) * at(k, 104)).sum()
    assert float(near - far) == pytest.approx(0.0, abs=1e-4)  # fp32 angles near 100 radians carry 4e-6 each
    assert float(at(q, 50).norm()) == pytest.approx(float(q.norm()), rel=1e-6)


@pytest.mark.parametrize("n_tokens", [5, 128, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_explicit_attention_equals_the_fused_one_forward_and_backward(n_tokens: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n_tokens, 16, generator=generator).requires_grad_() for h in (6, kv_heads, kv_heads))
    documents = (torch.rand(2, n_tokens, generator=generator) < 0.05).cumsum(1)
    mask = attention_mask(n_tokens, 50, documents, q.device, q.dtype, explicit=True)
    assert mask is not None
    upstream = torch.randn(q.shape, generator=generator)
    results = []
    for attend in (
        lambda: explicit_attention(q, k, v, mask, dropped=0.0, scale=16**-0.5),
        lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
    ):
        mixed = attend()
        results.append((mixed, *torch.autograd.grad(mixed, (q, k, v), upstream)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # sums of up to 300 fp32 products in another order


def test_explicit_attention_is_for_bf16_training_on_a_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert prefers_explicit(cpu, torch.bfloat16, 512, training=True)
    assert not prefers_explicit(cpu, torch.bfloat16, 512, training=False)
    assert not prefers_explicit(cpu, torch.float32, 512, training=True)
    assert not prefers_explicit(cpu, torch.bfloat16, 100_000, training=True)
    assert not prefers_explicit(gpu, torch.bfloat16, 512, training=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("spec", [SPEC, *TRAINED.values()], ids=["llama-of-16", *TRAINED])
def test_bf16_training_follows_fp32_in_value_and_gradient(spec: ModelSpec, autocast: bool) -> None:
    """Heads of 32 are attended natively where the processor can, those of 16 and bounded scores are not."""
    tokens = random_tokens(n_tokens=100) % spec.vocab_size
    positions, documents = packed([30, 70])
    reference = Decoder(spec)
    lower = Decoder(spec, torch.float32 if autocast else torch.bfloat16)
    losses, gradients = [], []
    for model, enabled in ((reference, False), (lower, autocast)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(tokens, positions.expand(2, -1), documents.expand(2, -1))
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)  # bf16 keeps 8 bits: 4e-3
    assert float(F.cosine_similarity(*gradients, dim=0)) > 0.999


# torch.compile looks at .grad itself and hides the warning in a way that does not work where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("spec", "documents"),
    [
        (SPEC, False),
        (SPEC, True),
        (SPEC.with_(family="qwen3", qk_norm=True, sliding_window=9), True),
        (GPT2, True),
        (FEATURES["gemma2"], True),
        (FEATURES["glm4"], True),
        (FEATURES["cohere2"], True),
        (FEATURES["glm4_moe"], True),
        (FEATURES["gpt_oss"], False),
        (FEATURES["deepseek_v3"], True),
    ],
    ids=[
        "llama",
        "llama-packed",
        "qwen3-windowed-packed",
        "gpt2-packed",
        "gemma2-packed",
        "glm4-packed",
        "cohere2-packed",
        "glm4_moe-packed",
        "gpt_oss",
        "deepseek_v3-packed",
    ],
)
def test_every_block_compiles_whole_and_computes_the_same(spec: ModelSpec, documents: bool) -> None:
    torch._dynamo.reset()
    model = Decoder(spec).train()
    tokens = random_tokens(n_tokens=32) % spec.vocab_size
    extra = [t.expand(2, -1) for t in packed([12, 20])] if documents else []
    eager = model(tokens, *extra)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")  # the graph is what is tested, not the C++ compiler
    assert relative_error(model(tokens, *extra), eager) <= 1e-5
    assert not any("_orig_mod" in name for name, _ in model.named_parameters())


# As above; and the graphs run as they are, without boxed arguments.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("family", [name for name, spec in FEATURES.items() if spec.departures.parallel_block])
def test_no_gradient_is_summed_twice_by_a_compiled_block(family: str) -> None:
    """Two such sums in a kernel are more than torch's compiler for CPUs can write: it declares one name twice."""
    torch._dynamo.reset()
    model, graphs = Decoder(FEATURES[family]).train(), []

    def backward(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=backward)
    model.blocks[0].compile(fullgraph=True, dynamic=False, backend=backend)
    model(random_tokens(n_tokens=32) % FEATURES[family].vocab_size).sum().backward()
    sums = [(_unviewed(node.args[0]), *node.args[1:]) for node in graphs[0].graph.nodes if "aten.sum" in str(node.target)]
    assert len(sums) == len(set(map(str, sums)))


def _unviewed(node: Any) -> Any:
    while "aten.view" in str(node.target):
        node = node.args[0]
    return node


@pytest.mark.parametrize("family", ["gpt_neox", "falcon"])
def test_biases_added_up_first_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients of a parallel block are those of the branches one by one; with frozen biases it takes these."""
    model, tokens = Decoder(FEATURES[family], torch.float32), random_tokens(n_tokens=20) % FEATURES[family].vocab_size
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    taken = []
    for joint in (True, False):
        if not joint:
            monkeypatch.setattr(Block, "_with_joint_bias", None)
            monkeypatch.setattr(Block, "_joint_biases", lambda block: None)
        model.zero_grad()
        loss = model(tokens).square().sum()
        loss.backward()
        taken.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, plain in zip(*taken, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))  # sums in another order
    monkeypatch.undo()
    assert model.blocks[0]._joint_biases() is not None
    assert model.requires_grad_(False).blocks[0]._joint_biases() is None


def test_dropout_acts_in_training_mode_only() -> None:
    for spec in (SPEC.with_(dropout=0.5), GPT2.with_(dropout=0.5)):
        model, tokens = Decoder(spec), random_tokens()
        model.train()
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))
        plain = Decoder(spec.with_(dropout=0.0)).eval()
        assert torch.equal(model(tokens), plain(tokens))


def test_learned_positions_end_with_a_sentence() -> None:
    with pytest.raises(InputError, match="49 tokens is longer than the max_positions=48"):
        Decoder(GPT2)(random_tokens(n_tokens=49))


def test_hidden_and_head_make_the_logits() -> None:
    for spec in (SPEC, SPEC.with_(tied_embeddings=True)):
        model, tokens = Decoder(spec).eval(), random_tokens()
        assert torch.equal(model(tokens), F.linear(model.hidden(tokens), model.head_weight))
        assert (model.head_weight is model.embed.weight) == spec.tied_embeddings


def test_fresh_weights_are_the_same_for_a_seed_in_any_dtype_and_differ_between_seeds() -> None:
    from twostroke.model.initialise import initialise

    first, second, other, low = Decoder(SPEC), Decoder(SPEC), Decoder(SPEC), Decoder(SPEC, torch.bfloat16)
    for model, seed in ((first, 3), (second, 3), (other, 4), (low, 3)):
        initialise(model, seed)
    for name, parameter in first.state_dict().items():
        assert torch.equal(parameter, second.state_dict()[name])
        assert torch.equal(parameter.bfloat16(), low.state_dict()[name])
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert not torch.equal(first.blocks[0].attn.out.weight, first.blocks[1].attn.out.weight)


def test_fresh_weights_have_the_documented_spread() -> None:
    spec = SPEC.with_(d_model=256, d_ff=512, n_layers=4)
    state = Decoder(spec).state_dict()
    expected = {
        "embed.weight": 0.02,
        "head.weight": 0.02,
        "blocks.1.attn.qkv.weight": 1 / math.sqrt(256),
        "blocks.1.mlp.gate_up.weight": 1 / math.sqrt(256),
        "blocks.1.attn.out.weight": 1 / math.sqrt(64) / math.sqrt(8),
        "blocks.1.mlp.down.weight": 1 / math.sqrt(512) / math.sqrt(8),
    }
    for name, std in expected.items():
        assert float(state[name].std()) == pytest.approx(std, rel=0.03)  # 16,000 draws or more: 0.6% each
    assert torch.equal(state["final_norm.weight"], torch.ones(256))


def test_a_fresh_model_predicts_close_to_uniformly() -> None:
    tokens = random_tokens()
    loss = F.cross_entropy(Decoder(SPEC)(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(V), abs=0.1)


def test_a_model_on_the_meta_device_takes_no_memory() -> None:
    model = Decoder(SPEC.with_(vocab_size=2**30, d_model=2**14), device="meta")
    assert sum(p.numel() for p in model.parameters()) > 2**44
