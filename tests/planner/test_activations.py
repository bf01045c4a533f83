"""Predicted activations are what autograd keeps, byte for byte, of the decoder that training runs."""

from __future__ import annotations

import itertools

import pytest
import torch

from machines import small_llama
from twostroke.core.spec import ModelSpec
from twostroke.model.attention import MAX_EXPLICIT_TOKENS
from twostroke.model.decoder import Decoder
from twostroke.planner.memory import EXPLICIT_ATTENTION_TOKENS, activation_bytes, attends_explicitly, keys_walked, query_blocks
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


def kept_bytes(spec: ModelSpec, dtype: str, rows: int, length: int, compiled: bool) -> int:
    """What one micro-batch of two packed documents a row keeps for its backward pass, the chunked loss included."""
    decoder = Decoder(spec, DTYPES[dtype]).train()
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
    return saved_activations_bytes(forward, decoder.parameters())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"n_kv_heads": 2}, {"tied_embeddings": False}, GPT2], ids=str)
@pytest.mark.parametrize("length", [100, 300])
def test_eager_activations_are_exact(dtype: str, changes: dict[str, object], length: int) -> None:
    spec = small_llama(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=16, **changes)
    predicted = activation_bytes(spec, dtype, False, 2, length, "cpu")
    assert kept_bytes(spec, dtype, 2, length, False) == pytest.approx(predicted, rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch: deprecations, and .grad of tensors it looks at
def test_compiled_activations_are_exact() -> None:
    """One case, since compiling takes longer than all other tests here together; the one with most terms."""
    changes = {"qk_norm": True, "n_kv_heads": 2}
    spec = small_llama(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=16, **changes)
    predicted = activation_bytes(spec, "bf16", True, 2, 100, "cpu")
    assert kept_bytes(spec, "bf16", 2, 100, True) == pytest.approx(predicted, rel=TOLERANCE)


def test_the_planner_knows_when_attention_is_explicit() -> None:
    """Two rooms state one rule: the planner may not import the model."""
    from twostroke.model.attention import prefers_explicit

    assert EXPLICIT_ATTENTION_TOKENS == MAX_EXPLICIT_TOKENS
    for dtype, tensor_type in DTYPES.items():
        for length in (1, EXPLICIT_ATTENTION_TOKENS, EXPLICIT_ATTENTION_TOKENS + 1):
            expected = prefers_explicit(torch.device("cpu"), tensor_type, length, training=True)
            assert attends_explicitly("cpu", dtype, length) == expected
    assert not attends_explicitly("gpu", "bf16", 512)


@pytest.mark.parametrize("length", [1, 100, 128, 129, 512, 513, 2048])
def test_blocks_of_queries_cover_the_sequence_and_walk_at_least_the_triangle(length: int) -> None:
    blocks = query_blocks(length)
    assert blocks[0][0] == 0
    assert blocks[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
    assert (length + 1) / 2 <= keys_walked("cpu", "bf16", length) <= length
    assert keys_walked("cpu", "fp32", length) == length
