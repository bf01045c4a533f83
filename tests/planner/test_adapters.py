"""Adapters: parameters as peft counts them, memory and work without what a frozen base does not need."""

from __future__ import annotations

import pytest

from machines import ideal_machine, small_llama
from twostroke.core.errors import ConfigError
from twostroke.planner.adapters import ALL_LINEAR, adapter_parameters
from twostroke.planner.flops import attention_flops_per_token, training_flops_per_token
from twostroke.planner.layout import Layout
from twostroke.planner.memory import nf4_bytes_per_weight
from twostroke.planner.params import count_parameters
from twostroke.planner.training import TrainingShape, plan_training, training_memory

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
    # the MLP's two inputs are not kept: E and F elements a token and layer
    assert everything["activations"] - some["activations"] == pytest.approx(8192 * 6 * 2 * (256 + 704))


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
