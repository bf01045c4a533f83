"""Predicted activations are what autograd keeps, byte for byte, of the decoder that training runs."""

from __future__ import annotations

import itertools

import pytest
import torch

from machines import ideal_machine, small_llama
from small_models import FEATURES
from twostroke.core.matrices import layer_kinds
from twostroke.core.policy import query_blocks, rows_at_once
from twostroke.core.rates import TrainingRates
from twostroke.core.spec import Departures, ModelSpec, MoeSpec
from twostroke.kernels import training_attention
from twostroke.model.decoder import Decoder
from twostroke.planner.training.memory import ActivationPolicy, _mlp_kept, keys_walked
from twostroke.planner.training.plan import training_memory
from twostroke.planner.training.shape import TrainingShape
from twostroke.training.activation_checkpointing import cached_bytes, checkpoint_activations
from twostroke.training.loss import chunked_cross_entropy
from twostroke.training.memory import saved_activations_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GPT2 = {
    "norm": "layernorm",
    "positions": "learned",
    "mlp": "gelu",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "attn_out_bias": True,
    "mlp_bias": True,
}
TOLERANCE = 1e-3
"""Learned positions add the ids of one row, 8·T bytes, that the formula leaves out; everything else is exact."""


def kept_bytes(spec: ModelSpec, dtype: str, rows: int, length: int, compiled: bool, checkpointing: str = "none") -> int:
    """What one micro-batch of two packed documents a row keeps for its backward pass, the chunked loss included."""
    decoder = Decoder(spec, DTYPES[dtype]).train()
    checkpoint_activations(decoder, checkpointing)
    tokens = torch.randint(0, spec.vocab_size, (rows, length))
    positions = torch.arange(length)[None].expand(rows, length)
    documents = (positions >= length // 2).int()

    def forward() -> torch.Tensor:
        hidden = decoder.hidden(tokens, positions, documents).flatten(0, 1)
        return chunked_cross_entropy(hidden, decoder.head_weight, tokens.flatten(), rows * length)

    if compiled:
        torch._dynamo.reset()
        for block in decoder.blocks:
            block.compile(dynamic=False)
        forward().backward()
    with cached_bytes() as cached:
        return saved_activations_bytes(forward, decoder.parameters()) + cached()


def planned_bytes(
    spec: ModelSpec, dtype: str, length: int, compiled: bool, checkpointing: str = "none", attends_natively: bool = False
) -> float:
    """The activations of a plan for two rows of ``length``."""
    shape = TrainingShape(2, length, dtype=dtype, compile=compiled, checkpointing=checkpointing)
    computer = ideal_machine(training=TrainingRates(attends_natively=attends_natively))
    return training_memory(spec, shape, computer)["activations"]


BOUNDED, SINKS = {"departures": Departures(attention_cap=4.0)}, {"departures": Departures(attention_sinks=True)}
OF_EXPERTS = 0.02
"""Rows of an expert are filled up to a multiple of an eighth, and indices of tokens and experts take 8 bytes, several times
over: 1.0 to 1.8% in layers as narrow as these."""


@pytest.mark.parametrize("natively", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(("family", "dtype"), list(itertools.product(("gemma2", "gpt_oss"), ("bf16", "fp32"))))
def test_activations_under_a_bound_or_beside_sinks(
    family: str, dtype: str, checkpointing: str, natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole families, with a window in one layer of two: by the native operator, and where it is not there."""
    if natively and (dtype != "bf16" or not training_attention.is_available()):
        pytest.skip("no native attention here")
    monkeypatch.setattr(training_attention, "is_available", lambda: natively)
    spec = FEATURES[family].with_(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, sliding_window_layers=(0,))
    predicted = planned_bytes(spec, dtype, 300, False, checkpointing, attends_natively=natively)
    tolerance = OF_EXPERTS if spec.moe is not None and checkpointing == "none" else TOLERANCE
    assert kept_bytes(spec, dtype, 2, 300, False, checkpointing) == pytest.approx(predicted, rel=tolerance)


@pytest.mark.parametrize("changes", [BOUNDED, SINKS], ids=("bound", "sinks"))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("length", [100, 300, 2100])
def test_explicit_attention_keeps_what_a_bound_and_sinks_add(length: int, dtype: str, changes: dict[str, object]) -> None:
    """Of heads that the native operator refuses, in every type, and also where other models take SDPA (fp32, 2,100 tokens)."""
    spec = small_llama(n_layers=1, vocab_size=300, d_model=64, d_ff=192, n_heads=4, n_kv_heads=2, head_dim=16, **changes)
    predicted = planned_bytes(spec, dtype, length, False, attends_natively=True)
    rows = rows_at_once("cpu", True, 2, length)
    assert kept_bytes(spec, dtype, rows, length, False) == pytest.approx(predicted, rel=1e-6)


BLOCKS = (
    {"departures": Departures(norms_per_block=4)},
    {"departures": Departures(norms_after=True)},
    {"departures": Departures(parallel_block=True)},
    {"departures": Departures(parallel_block=True, norms_per_block=1)},
)
"""Norms around each branch, after it; both branches from one residual, under a norm each or one."""


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", BLOCKS, ids=("around", "after", "parallel", "one norm"))
def test_eager_activations_of_other_blocks(dtype: str, changes: dict[str, object]) -> None:
    spec = small_llama(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=16, **changes)
    predicted = planned_bytes(spec, dtype, 300, False)
    assert kept_bytes(spec, dtype, 2, 300, False) == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"n_kv_heads": 2}, {"tied_embeddings": False}, GPT2], ids=str)
@pytest.mark.parametrize("length", [100, 300])
def test_eager_activations_are_exact(dtype: str, changes: dict[str, object], length: int) -> None:
    spec = small_llama(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=16, **changes)
    predicted = planned_bytes(spec, dtype, length, False)
    assert kept_bytes(spec, dtype, 2, length, False) == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.skipif(not training_attention.is_available(), reason="no native attention here")
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"n_kv_heads": 2}, GPT2, BOUNDED, SINKS], ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_activations_of_native_attention_are_exact(changes: dict[str, object], checkpointing: str) -> None:
    spec = small_llama(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=32, **changes)
    predicted = planned_bytes(spec, "bf16", 100, False, checkpointing, attends_natively=True)
    assert kept_bytes(spec, "bf16", 2, 100, False, checkpointing) == pytest.approx(predicted, abs=8 * 100)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch: deprecations, and .grad of tensors it looks at
@pytest.mark.parametrize(
    ("head_dim", "changes"),  # explicit, native
    [
        (16, {"qk_norm": True}),
        (32, {"qk_norm": True}),
        (16, {"departures": Departures(attention_cap=4.0, attention_sinks=True)}),
        (32, {"departures": Departures(attention_cap=4.0, attention_sinks=True)}),
    ],
    ids=("explicit", "native", "explicit, bound and sinks", "native, bound and sinks"),
)
def test_compiled_activations_are_exact(head_dim: int, changes: dict[str, object]) -> None:
    """Few cases of each attention, since compiling takes longer than all other tests here together; those with most terms."""
    natively = head_dim == 32
    if natively and not training_attention.is_available():
        pytest.skip("no native attention here")
    changes = {"n_kv_heads": 2} | changes
    spec = small_llama(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=head_dim, **changes)
    predicted = planned_bytes(spec, "bf16", 100, True, attends_natively=natively)
    assert kept_bytes(spec, "bf16", 2, 100, True) == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"n_kv_heads": 2}, GPT2, *BLOCKS], ids=str)
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointed_activations_are_exact(checkpointing: str, dtype: str, changes: dict[str, object]) -> None:
    spec = small_llama(n_layers=3, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=16, **changes)
    predicted = planned_bytes(spec, dtype, 300, False, checkpointing)
    ids = 8 * 300 if spec.positions == "learned" else 0  # of one row, which the formula leaves out
    assert kept_bytes(spec, dtype, 2, 300, False, checkpointing) - ids == pytest.approx(predicted, rel=1e-6)


@pytest.mark.parametrize("length", [1, 100, 128, 129, 512, 513, 2048])
def test_blocks_of_queries_cover_the_sequence_and_walk_at_least_the_triangle(length: int) -> None:
    blocks = query_blocks(length)
    assert blocks[0][0] == 0
    assert blocks[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
    assert (length + 1) / 2 <= keys_walked("cpu", "bf16", length) <= length
    assert keys_walked("cpu", "fp32", length) == length


@pytest.mark.parametrize("tokens", [64, 200])
def test_experts_keep_what_autograd_keeps_of_a_layer_written_out(tokens: int) -> None:
    """The decoder has no experts yet, so a plain one stands here: route, gather, two products, weight, add."""
    width, d_expert, n_experts, top_k = 64, 48, 8, 2
    spec = small_llama(d_model=width, n_layers=1, moe=MoeSpec(n_experts, top_k, d_expert))
    router, up, down = (
        torch.nn.Parameter(torch.randn(*shape, dtype=torch.bfloat16) / 8)
        for shape in ((width, n_experts), (n_experts, width, 2 * d_expert), (n_experts, d_expert, width))
    )
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        probabilities = torch.softmax((hidden @ router).float(), -1)
        weights, chosen = probabilities.topk(top_k)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=n_experts).tolist()
        gathered = hidden[order // top_k]
        outputs = []
        for expert, rows in enumerate(gathered.split(counts)):
            gate, upper = (rows @ up[expert]).chunk(2, -1)
            outputs.append((torch.nn.functional.silu(gate) * upper) @ down[expert])
        weighted = torch.cat(outputs) * weights.flatten()[order, None].to(torch.bfloat16)
        # summed by token after undoing the order: index_add would keep its operand only to know its shape
        return weighted[order.argsort()].view(tokens, top_k, width).sum(1).sum()

    kept = saved_activations_bytes(forward, [router, up, down])
    ((kind, _),) = layer_kinds(spec)
    normed_input = 2 * width  # which the router reads
    predicted = _mlp_kept(spec, kind, ActivationPolicy(compiled=False)) + normed_input
    # indices of tokens and experts, 8 bytes each several times over, are what is left: 5% in a layer as narrow as this
    assert kept / tokens == pytest.approx(predicted, rel=0.08)
