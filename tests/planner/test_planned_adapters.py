"""Adapters: parameters as peft counts them, memory and work without what a frozen base does not need."""

from __future__ import annotations

import pytest

from machines import ideal_machine, small_llama
from twostroke.core.errors import ConfigError
from twostroke.core.families import config_from_spec
from twostroke.core.matrices import ALL_LINEAR, layer_kinds
from twostroke.core.spec import ModelSpec, MoeSpec
from twostroke.planner.training.layout import Layout
from twostroke.planner.training.memory import nf4_bytes_per_weight
from twostroke.planner.training.plan import plan_training, training_memory
from twostroke.planner.training.shape import TrainingShape
from twostroke.planner.work.flops import attention_flops_per_token, training_flops_per_token
from twostroke.planner.work.params import active_adapter_parameters, adapter_parameters, count_parameters, modules_of

TARGETS = (("q_proj", "v_proj"), ("o_proj", "down_proj"), ("gate_proj",), (ALL_LINEAR,))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads a property that transformers will drop
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_adapters_have_as_many_parameters_as_pefts(targets: tuple[str, ...]) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    with torch.device("meta"):
        model = get_peft_model(
            LlamaForCausalLM(config), LoraConfig(r=8, target_modules=targets[0] if ALL_LINEAR in targets else list(targets))
        )
    spec = small_llama(vocab_size=512, d_model=64, d_ff=176, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(spec, 8, targets) == trained


def test_a_target_that_no_layer_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'q_proj'"):
        plan_training(small_llama(), TrainingShape(method="lora", lora_targets=("q_pro",)), ideal_machine())


def test_nf4_takes_half_a_byte_and_its_scales() -> None:
    """QLoRA (arXiv 2305.14314): double quantisation brings scales from 0.5 to 0.127 bits a weight."""
    assert 8 * nf4_bytes_per_weight() == pytest.approx(4.127, abs=5e-4)


def test_a_frozen_base_has_neither_gradients_nor_state() -> None:
    spec, n = small_llama(), count_parameters(small_llama())
    adapters = adapter_parameters(spec, 16, (ALL_LINEAR,))
    lora = training_memory(spec, TrainingShape(method="lora"), ideal_machine())
    assert lora["weights"] == pytest.approx(2 * n.total + 6 * adapters)
    assert lora["gradients"] == pytest.approx(6 * adapters)
    assert lora["optimizer"] == pytest.approx(8 * adapters)
    qlora = training_memory(spec, TrainingShape(method="qlora"), ideal_machine())
    rest = n.total - n.block_matrices
    assert qlora["weights"] == pytest.approx(nf4_bytes_per_weight() * n.block_matrices + 2 * rest + 6 * adapters)
    assert qlora["dequantised"] == 2 * 1408 * 256


def test_inputs_are_kept_only_where_an_adapter_needs_them() -> None:
    attention_only = TrainingShape(method="lora", lora_targets=("q_proj", "v_proj"))
    everything = training_memory(small_llama(), TrainingShape(method="lora"), ideal_machine())
    some = training_memory(small_llama(), attention_only, ideal_machine())
    # not kept in each layer: the inputs of out (E), gate and up (E) and down (F), and five adapters' narrow products
    assert everything["activations"] - some["activations"] == pytest.approx(2048 * 6 * 2 * (256 + 256 + 704 + 5 * 16))


def test_frozen_matrices_cost_four_flop_a_parameter_and_adapters_six() -> None:
    spec, n = small_llama(), count_parameters(small_llama())
    plan = plan_training(spec, TrainingShape(method="lora"), ideal_machine())
    attention = attention_flops_per_token(spec, 512)
    adapters = adapter_parameters(spec, 16, (ALL_LINEAR,))
    assert plan.flops_per_token == 4 * n.in_products + 6 * adapters + 3 * attention
    assert plan.flops_per_token < 0.8 * training_flops_per_token(spec, 512)
    full = plan_training(spec, TrainingShape(), ideal_machine())
    backward = sum(w.flops for w in plan.backward if w.component == "mlp")
    assert backward < 0.6 * sum(w.flops for w in full.backward if w.component == "mlp")


def test_only_adapters_are_reduced_between_ranks_and_written_to_disk() -> None:
    spec = small_llama()
    layout = Layout(data=4)
    lora, full = (plan_training(spec, TrainingShape(method=m), ideal_machine(), layout) for m in ("lora", "full"))
    share = adapter_parameters(spec, 16, (ALL_LINEAR,)) / count_parameters(spec).total
    assert lora.traffic[0].sent_bytes == pytest.approx(share * full.traffic[0].sent_bytes)
    assert lora.checkpoint_bytes == pytest.approx(share * full.checkpoint_bytes)


def test_qlora_is_smaller_and_slower_than_lora() -> None:
    spec = small_llama(d_model=4096, d_ff=14336, n_heads=32, n_kv_heads=8, head_dim=128, n_layers=4)
    machine = ideal_machine()
    lora, qlora = (plan_training(spec, TrainingShape(1, 512, method=m), machine) for m in ("lora", "qlora"))
    assert qlora.memory_bytes["weights"] < 0.5 * lora.memory_bytes["weights"]
    assert qlora.step_time_s > lora.step_time_s


GPT2 = {
    "family": "gpt2", "norm": "layernorm", "positions": "learned", "mlp": "gelu", "activation": "gelu_tanh", "qkv_bias": True,
    "attn_out_bias": True, "mlp_bias": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_kv_heads": 2, "family": "qwen3", "qk_norm": True}, GPT2, {"family": "mixtral", "moe": MoeSpec(3, 1, 96)}],
    ids=["llama", "qwen3", "gpt2", "mixtral"],
)
def test_modules_are_those_that_the_adapters_of_a_decoder_know(changes: dict[str, object]) -> None:
    """The planner may not import the model, so two rooms state one naming."""
    from twostroke.model.adapters import all_targets

    spec = small_llama(n_layers=1, **changes)
    ((kind, _),) = layer_kinds(spec)
    ours = {(module, outputs, product.k) for product in kind.matrices for module, outputs in modules_of(product, spec.family)}
    theirs = {(t.stored.partition(".0.")[2], t.rows, t.columns) for t in all_targets(spec)}
    assert ours == theirs


def test_names_match_as_peft_matches_them() -> None:
    spec = small_llama(**GPT2)
    both = adapter_parameters(spec, 8, ("c_proj",))
    assert both == adapter_parameters(spec, 8, ("attn.c_proj", "mlp.c_proj"))
    assert adapter_parameters(spec, 8, ("transformer.h.0.attn.c_attn",)) == adapter_parameters(spec, 8, ("c_attn",))


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def small_mixture(**changes: object) -> ModelSpec:
    moe = MoeSpec(5, 2, 96, n_shared_experts=1, d_shared=40, shared_gate=True)
    return small_llama(family="qwen2_moe", qkv_bias=True, moe=moe, **changes)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads a property that transformers will drop
def test_experts_adapters_have_as_many_parameters_as_pefts() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = small_mixture(n_layers=2)
    config = AutoConfig.for_model(**config_from_spec(spec))
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        model = get_peft_model(base, LoraConfig(r=8, target_modules=[], target_parameters=list(EXPERTS)))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(spec, 8, EXPERTS) == trained
    assert active_adapter_parameters(spec, 8, EXPERTS) == trained * 2 // 5
    assert adapter_parameters(spec, 8, (ALL_LINEAR,)) == adapter_parameters(spec, 8, (ALL_LINEAR, *EXPERTS)) - trained


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("targets", [(ALL_LINEAR,), (ALL_LINEAR, *EXPERTS)], ids=str)
def test_activations_of_experts_beside_a_frozen_base(dtype: str, targets: tuple[str, ...]) -> None:
    """Rows' numbers and shares, which are not counted, are 4% at so small a width."""
    small = small_mixture(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, n_kv_heads=4, head_dim=16)
    assert kept_bytes(small, dtype, targets) == pytest.approx(planned_bytes(small, dtype, targets), rel=0.05)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("targets", [(ALL_LINEAR,), ("q_proj", "v_proj"), ("up_proj", "down_proj")], ids=str)
def test_activations_beside_a_frozen_base_are_what_autograd_keeps(dtype: str, targets: tuple[str, ...]) -> None:
    spec = small_llama(n_layers=2, vocab_size=300, d_model=64, d_ff=192, n_heads=4, head_dim=16)
    assert kept_bytes(spec, dtype, targets) == pytest.approx(planned_bytes(spec, dtype, targets), rel=0.02)


def planned_bytes(spec: ModelSpec, dtype: str, targets: tuple[str, ...]) -> float:
    shape = TrainingShape(2, 100, dtype=dtype, compile=False, method="lora", lora_rank=8, lora_targets=targets)
    return training_memory(spec, shape, ideal_machine())["activations"]


def kept_bytes(spec: ModelSpec, dtype: str, targets: tuple[str, ...]) -> float:
    """What autograd keeps of a step of 2 × 100 tokens."""
    import torch

    from twostroke.model.adapters import AdapterSettings, attach_adapters
    from twostroke.model.decoder import Decoder
    from twostroke.training.loss import chunked_cross_entropy
    from twostroke.training.memory import saved_activations_bytes

    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    decoder = Decoder(spec, torch_dtype).train()
    for buffer in decoder.buffers():
        buffer.zero_()
    attach_adapters(decoder, spec, AdapterSettings(8, 16.0, targets), seed=0)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(torch_dtype)
    tokens = torch.randint(0, spec.vocab_size, (2, 100))
    positions = torch.arange(100)[None].expand(2, 100)

    def forward() -> torch.Tensor:
        hidden = decoder.hidden(tokens, positions, (positions >= 50).int()).flatten(0, 1)
        return chunked_cross_entropy(hidden, decoder.head_weight, tokens.flatten(), 200)

    return saved_activations_bytes(forward, decoder.parameters())
