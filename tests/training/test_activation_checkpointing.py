from __future__ import annotations

import pytest
import torch
from torch import Tensor

from machines import small_llama
from twostroke.core.errors import ConfigError
from twostroke.core.matrices import qkv_rows
from twostroke.core.spec import ModelSpec
from twostroke.model.adapters import AdapterSettings, attach_adapters
from twostroke.model.decoder import Decoder
from twostroke.training import parallelize
from twostroke.training.activation_checkpointing import cached_bytes, checkpoint_activations
from twostroke.training.loss import chunked_cross_entropy
from twostroke.training.memory import saved_activations_bytes

SPEC = small_llama(n_layers=3, vocab_size=120, d_model=32, d_ff=96, n_heads=4, n_kv_heads=2, head_dim=8, qk_norm=True)
GPT2 = {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "activation": "gelu_tanh", "qkv_bias": True}
POLICIES = ("selective", "full")
ROWS, LENGTH = 2, 40


class _Model:
    def __init__(self, spec: ModelSpec, policy: str, dtype: torch.dtype = torch.float32, compiled: bool = False) -> None:
        self.decoder = Decoder(spec, dtype).train()
        checkpoint_activations(self.decoder, policy)
        if compiled:
            torch._dynamo.reset()
            parallelize.compile_blocks(self.decoder)

    def loss(self) -> Tensor:
        tokens = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7 % 120
        positions = torch.arange(LENGTH)[None].expand(ROWS, LENGTH)
        hidden = self.decoder.hidden(tokens, positions, (positions >= LENGTH // 2).int()).flatten(0, 1)
        return chunked_cross_entropy(hidden, self.decoder.head_weight, tokens.flatten().roll(-1), ROWS * LENGTH)

    def gradients(self, seed: int = 1) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        self.decoder.zero_grad()
        self.loss().backward()
        return {name: p.grad for name, p in self.decoder.named_parameters() if p.grad is not None}

    def kept_bytes(self) -> int:
        with cached_bytes() as cached:
            return saved_activations_bytes(self.loss, self.decoder.parameters()) + cached()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", [{}, GPT2, {"sliding_window": 8}], ids=["llama", "gpt2", "window"])
def test_gradients_are_those_without_it_bit_for_bit(policy: str, changes: dict[str, object], dtype: torch.dtype) -> None:
    spec = small_llama(n_layers=3, vocab_size=120, d_model=32, d_ff=96, n_heads=4, head_dim=8, **changes)
    plain, recomputed = _Model(spec, "none", dtype).gradients(), _Model(spec, policy, dtype).gradients()
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", [{}, GPT2], ids=["attention", "residual"])
def test_dropout_draws_again_what_it_drew(policy: str, changes: dict[str, object]) -> None:
    spec = small_llama(n_layers=2, vocab_size=120, d_model=32, d_ff=96, n_heads=4, head_dim=8, dropout=0.3, **changes)
    plain, recomputed = _Model(spec, "none"), _Model(spec, policy)
    expected, found, other = plain.gradients(), recomputed.gradients(), recomputed.gradients(seed=2)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not torch.equal(found["embed.weight"], other["embed.weight"])


@pytest.mark.parametrize("policy", POLICIES)
def test_adapters_beside_a_frozen_base_get_the_same_gradients(policy: str) -> None:
    found = []
    for kind in ("none", policy):
        model = _Model(SPEC, kind)
        attach_adapters(model.decoder, SPEC, AdapterSettings(4, 8.0, ("all-linear",), dropout=0.2), seed=0)
        for name, parameter in model.decoder.named_parameters():
            if name.endswith(".b"):
                torch.nn.init.constant_(parameter, 0.01)
        found.append(model.gradients())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_policy_keeps_less_than_the_one_before(dtype: torch.dtype) -> None:
    none, selective, full = (_Model(SPEC, policy, dtype).kept_bytes() for policy in ("none", "selective", "full"))
    w = dtype.itemsize
    inputs = SPEC.n_layers * ROWS * LENGTH * SPEC.d_model * w
    assert inputs < full < selective < none
    # products of selective: packed q, k, v, the residual's second operand and 2F
    wide = SPEC.n_layers * ROWS * LENGTH * w * (qkv_rows(SPEC) + SPEC.d_model + 2 * SPEC.d_ff)
    assert wide <= selective - full < 1.3 * wide


def test_scoring_is_untouched() -> None:
    model, plain = _Model(SPEC, "full"), _Model(SPEC, "none")
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(model.decoder(tokens), plain.decoder(tokens))


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch: deprecations, and .grad of tensors it looks at
@pytest.mark.skipif(parallelize.why_not_compile(torch.device("cpu")) is not None, reason="no C++ compiler here")
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_blocks_share_a_graph_and_keep_as_little(policy: str) -> None:
    plain, eager = _Model(SPEC, "none"), _Model(SPEC, policy)
    model = _Model(SPEC, policy, compiled=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = model.gradients()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
    for name, expected in plain.gradients().items():
        # fp32 sums in another order
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-5, msg=name)
    # a block that is run again keeps the state of the random numbers too, which the compiled one shows to autograd
    allowed = SPEC.n_layers * torch.get_rng_state().numel()
    assert 0 <= model.kept_bytes() - eager.kept_bytes() <= allowed
    torch._dynamo.reset()


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'some' is not known"):
        checkpoint_activations(Decoder(SPEC), "some")
