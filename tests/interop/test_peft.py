"""Adapters here and in the ``peft`` package are the same: its logits, merged, unmerged and reloaded ones are held together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_models import save_reference
from small_models import SPECS, decoder_of, saved
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.core.families import layout
from twostroke.interop.export_model import export_model
from twostroke.interop.import_model import import_model
from twostroke.model.adapter_directory import CONFIG_NAME, WEIGHTS_NAME, save_adapters
from twostroke.model.adapters import AdapterSettings, attach_adapters, parts_of, peft_weights
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # transformers' own
    # peft looks for patterns of parameters among modules alone, and applies them
    pytest.mark.filterwarnings(r"ignore:The following \w+_pattern keys did not match:RuntimeWarning"),
]

TOKENS = torch.randint(2, 97, (2, 30), generator=torch.Generator().manual_seed(5))
TOLERANCE = 1e-4
"""Of the largest logit, fp32: the same few hundred products summed in another order. A wrong row or scale: above 1e-2."""

CASES = {
    "llama": ("all-linear",),
    "llama-scaled": ("q_proj", "down_proj"),
    "mistral": ("v_proj", "gate_proj"),
    "qwen2": ("k_proj", "up_proj"),
    "qwen3": ("o_proj", "v_proj"),
    "olmo2": ("o_proj", "v_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "gemma2": ("q_proj", "down_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "gpt_neox": ("query_key_value", "dense"),
}


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() <= TOLERANCE * b.abs().max()


def ours(name: str, targets: tuple[str, ...]) -> tuple[Decoder, AdapterSettings]:
    return adapted(decoder_of(name), targets)


def adapted(decoder: Decoder, targets: tuple[str, ...], **settings_of: Any) -> tuple[Decoder, AdapterSettings]:
    """``decoder`` with adapters whose B is not 0."""
    settings = AdapterSettings(4, 10.0, targets, **settings_of)
    attach_adapters(decoder, decoder.spec, settings, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter_name.endswith(".b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder, settings


def save(decoder: Decoder, settings: AdapterSettings, base: Path, directory: Path) -> Path:
    weights = peft_weights(decoder.spec, {name: p.detach() for name, p in decoder.named_parameters() if p.requires_grad})
    return save_adapters(weights, decoder.spec, settings, base, directory, base)


def transformers_base(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CASES))
def test_ours_in_peft(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    plain, base = saved(name, tmp_path / "base")
    decoder, settings = ours(name, CASES[name])
    directory = save(decoder, settings, base, tmp_path / "adapters")
    theirs = PeftModel.from_pretrained(transformers_base(base), directory).eval()
    unmerged = decoder(TOKENS)
    close(theirs(TOKENS).logits, unmerged)
    close(theirs.merge_and_unload()(TOKENS).logits, unmerged)
    close(load_model(directory)(TOKENS), unmerged)  # reloaded, merged on the way
    report = export_model(directory, tmp_path / "merged", merge=True, precision="fp32")
    assert report.base == str(base)
    close(load_model(tmp_path / "merged")(TOKENS), unmerged)
    close(transformers_base(tmp_path / "merged")(TOKENS).logits, unmerged)
    assert (plain(TOKENS) - unmerged).abs().max() > 100 * TOLERANCE * unmerged.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("rslora", [False, True])
def test_pefts_here(name: str, rslora: bool, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    _, base = saved(name, tmp_path / "base")
    targets = list(CASES[name]) if CASES[name] != ("all-linear",) else ["q_proj", "k_proj", "up_proj", "o_proj"]
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=10, target_modules=targets, use_rslora=rslora, init_lora_weights=False, fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM", rank_pattern={targets[0]: 2}, alpha_pattern={targets[-1]: 5},
    )  # fmt: skip
    model = get_peft_model(transformers_base(base), config).eval()
    model.save_pretrained(tmp_path / "theirs")
    wanted = model(TOKENS).logits
    assert not (tmp_path / "theirs" / "config.json").exists()
    close(load_model(tmp_path / "theirs")(TOKENS), wanted)
    report = import_model(tmp_path / "theirs", tmp_path / "imported", dtype="fp32")
    assert report.kind == "PEFT adapter"
    close(load_model(tmp_path / "imported")(TOKENS), wanted)


@torch.no_grad()
def test_adapters_trained_on_nf4_are_merged_into_what_nf4_left(tmp_path: Path) -> None:
    from twostroke.model.adapters import nf4_round_trip

    _, base = saved("llama", tmp_path / "base")
    decoder, _ = ours("llama", ("all-linear",))
    settings = AdapterSettings(4, 10.0, ("all-linear",), nf4=True, nf4_block=32, double_quantization=True)
    directory = save(decoder, settings, base, tmp_path / "adapters")
    rounded = decoder_of("llama")
    for name, parameter in rounded.named_parameters():
        if name.startswith("blocks.") and parameter.dim() == 2:
            parameter.copy_(nf4_round_trip(parameter, 32, True))
    parameters = dict(decoder.named_parameters())
    for name, parameter in rounded.named_parameters():
        parameters[name if name in parameters else name.replace(".weight", ".base.weight")].copy_(parameter)
    close(load_model(directory)(TOKENS), decoder(TOKENS))
    report = export_model(directory, tmp_path / "merged", merge=True)
    assert any("NF4" in note for note in report.notes)


MIXTURES = {
    "mixtral": ("gate_up_proj", "down_proj", "q_proj"),
    "qwen2_moe": ("experts.gate_up_proj", "experts.down_proj", "shared_expert.down_proj"),
    "qwen3_moe": ("all-linear", "experts.down_proj"),
    "olmoe": ("experts.gate_up_proj",),
    "granitemoe": ("gate_up_proj", "down_proj"),
    "glm4_moe": ("all-linear", "gate_up_proj", "down_proj"),
    "minimax_m2": ("gate_up_proj", "down_proj"),
    "deepseek_v2": ("gate_up_proj", "down_proj", "up_proj"),
    "deepseek_v3": ("all-linear", "gate_up_proj", "down_proj"),
    "gpt_oss": ("gate_up_proj", "down_proj", "v_proj"),
}


@torch.no_grad()
@pytest.mark.parametrize("case", sorted(MIXTURES))
def test_experts_adapters_in_peft(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    plain = save_reference(case, tmp_path / "base")
    decoder, settings = adapted(load_model(tmp_path / "base"), MIXTURES[case])
    directory = save(decoder, settings, tmp_path / "base", tmp_path / "adapters")
    unmerged = decoder(TOKENS)
    assert (plain(TOKENS).logits - unmerged).abs().max() > 100 * TOLERANCE * unmerged.abs().max()
    theirs = PeftModel.from_pretrained(transformers_base(tmp_path / "base"), directory).eval()
    close(theirs(TOKENS).logits, unmerged)
    close(load_model(directory)(TOKENS), unmerged)
    export_model(directory, tmp_path / "merged", merge=True, precision="fp32")
    close(transformers_base(tmp_path / "merged")(TOKENS).logits, unmerged)


@torch.no_grad()
@pytest.mark.parametrize("case", sorted(MIXTURES))
def test_pefts_experts_here(case: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    save_reference(case, tmp_path / "base")
    parameters = ["experts.down_proj"] if case == "olmoe" else ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=10, target_modules=["o_proj"], target_parameters=parameters, init_lora_weights=False,
        rank_pattern={"experts.down_proj": 2}, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(transformers_base(tmp_path / "base"), config).eval()
    model.save_pretrained(tmp_path / "theirs")
    close(load_model(tmp_path / "theirs")(TOKENS), model(TOKENS).logits)


@torch.no_grad()
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_adapters_of_every_expert_by_itself_as_transformers_4_had_them(case: str, tmp_path: Path) -> None:
    """PEFT 0.21 joins such adapters when it reads them."""
    from peft import PeftModel

    save_reference(case, tmp_path / "base")
    decoder = load_model(tmp_path / "base")
    generator, tensors = torch.Generator().manual_seed(4), {}
    targets = [t for e in layout(decoder.spec) if e.matrix is not None and e.matrix.copies > 1 for t in parts_of(e)]
    for target in targets:
        for which, shape in (("A", (4, target.columns)), ("B", (target.rows, 4))):
            name = f"base_model.model.{target.stored}.lora_{which}.weight"
            tensors[name] = 0.3 * torch.randn(shape, generator=generator)
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / WEIGHTS_NAME)
    document = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 10,
        "base_model_name_or_path": str(tmp_path / "base"), "target_modules": sorted({t.name for t in targets}),
    }  # fmt: skip
    (tmp_path / "theirs" / CONFIG_NAME).write_text(json.dumps(document))
    wanted = PeftModel.from_pretrained(transformers_base(tmp_path / "base"), tmp_path / "theirs").eval()(TOKENS).logits
    close(load_model(tmp_path / "theirs")(TOKENS), wanted)
    assert (decoder(TOKENS) - wanted).abs().max() > 100 * TOLERANCE * wanted.abs().max()


class TestRefusals:
    def make(self, tmp_path: Path) -> Path:
        _, base = saved("llama", tmp_path / "base")
        return save(*ours("llama", ("q_proj",)), base, tmp_path / "adapters")

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"use_dora": True}, "use_dora=True is not supported"),
            ({"bias": "all"}, "bias='all' is not supported"),
            ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"init_lora_weights": "pissa"}, "may have changed the base"),
            ({"rank_pattern": {"q_.*": 3}}, "plain module names"),
        ],
    )
    def test_what_would_compute_something_else(self, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
        directory = self.make(tmp_path)
        document = json.loads((directory / CONFIG_NAME).read_text())
        (directory / CONFIG_NAME).write_text(json.dumps(document | changes))
        with pytest.raises(ConfigError, match=sentence):
            load_model(directory)

    def test_an_adapter_configuration_that_is_wrong_is_refused(self, tmp_path: Path) -> None:
        directory = self.make(tmp_path)
        for text, sentence in (("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "peft_type=None")):
            (directory / CONFIG_NAME).write_text(text)
            with pytest.raises((CorruptFileError, ConfigError), match=sentence):
                load_model(directory)

    def test_a_pickle_is_never_opened(self, tmp_path: Path) -> None:
        directory = self.make(tmp_path)
        (directory / WEIGHTS_NAME).rename(directory / "adapter_model.bin")
        with pytest.raises(InputError, match="a pickle, which is never opened"):
            load_model(directory)

    def test_merge_and_no_merge(self, tmp_path: Path) -> None:
        directory = self.make(tmp_path)
        with pytest.raises(InputError, match="Give --merge"):
            export_model(directory, tmp_path / "out")
        with pytest.raises(InputError, match="nothing to merge"):
            export_model(tmp_path / "base", tmp_path / "out", merge=True)
        assert not (tmp_path / "out").exists()


def test_peft_writes_the_layout_we_write(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    _, base = saved("llama", tmp_path / "base")
    directory = save(*ours("llama", ("all-linear",)), base, tmp_path / "ours")
    config = LoraConfig(r=4, lora_alpha=10, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(transformers_base(base), config).save_pretrained(tmp_path / "theirs")
    shapes = [{k: t.shape for k, t in load_file(d / WEIGHTS_NAME).items()} for d in (directory, tmp_path / "theirs")]
    assert shapes[0] == shapes[1]
    found, wanted = (json.loads((d / CONFIG_NAME).read_text()) for d in (directory, tmp_path / "theirs"))
    assert set(found) <= set(wanted)  # a key that peft does not know would be warned of
    assert sorted(found["target_modules"]) == sorted(wanted["target_modules"])


def test_the_specs_cover_every_family() -> None:
    assert set(CASES) >= set(SPECS)
