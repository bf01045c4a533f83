"""The registry of model families, and the two directions between a ``config.json`` and a ``ModelSpec``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from twostroke.core.errors import ConfigError, UnsupportedFamilyError
from twostroke.core.families import dense, earlier, experts, gemma, gpt2, latent, llama, phi
from twostroke.core.families.quantised import checkpoint_scheme
from twostroke.core.families.reader import Reader
from twostroke.core.families.short_keys import has_short_keys, with_family_keys
from twostroke.core.families.weights import (
    FALCON_WEIGHTS,
    GEMMA2_WEIGHTS,
    GLM4_WEIGHTS,
    GPT2_WEIGHTS,
    GPT_BIGCODE_WEIGHTS,
    GPT_NEO_WEIGHTS,
    GPT_NEOX_WEIGHTS,
    GPT_OSS_WEIGHTS,
    GRANITE_MOE_WEIGHTS,
    LLAMA_WEIGHTS,
    MINIMAX_WEIGHTS,
    MIXTRAL_WEIGHTS,
    OLMO2_WEIGHTS,
    PHI3_WEIGHTS,
    PHI_WEIGHTS,
    QWEN2_MOE_WEIGHTS,
    STARCODER2_WEIGHTS,
    Entry,
    WeightNames,
    tensors,
)
from twostroke.core.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """One row of the registry: ``parse`` reads a Hugging Face config, ``write`` makes one that transformers accepts.

    ``write`` None: a family that is planned and not built, so nothing is ever written for it. ``weights`` names the matrices
    on disk, of a planned family those that adapters are planned for.
    """

    name: str
    architecture: str
    parse: Callable[[dict[str, Any]], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]] | None = None
    weights: WeightNames = LLAMA_WEIGHTS


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("llama", "LlamaForCausalLM", llama.parse_llama, llama.write_llama),
        Family("mistral", "MistralForCausalLM", llama.parse_mistral, llama.write_mistral),
        Family("qwen2", "Qwen2ForCausalLM", llama.parse_qwen2, llama.write_qwen),
        Family("qwen3", "Qwen3ForCausalLM", llama.parse_qwen3, llama.write_qwen),
        Family("olmo2", "Olmo2ForCausalLM", dense.parse_olmo2, dense.write_olmo2, OLMO2_WEIGHTS),
        Family("olmo3", "Olmo3ForCausalLM", dense.parse_olmo3, dense.write_olmo3, OLMO2_WEIGHTS),
        Family("gpt2", "GPT2LMHeadModel", gpt2.parse_gpt2, gpt2.write_gpt2, GPT2_WEIGHTS),
        Family("gpt_bigcode", "GPTBigCodeForCausalLM", gpt2.parse_gpt_bigcode, gpt2.write_gpt_bigcode, GPT_BIGCODE_WEIGHTS),
        Family("gpt_neo", "GPTNeoForCausalLM", earlier.parse_gpt_neo, earlier.write_gpt_neo, GPT_NEO_WEIGHTS),
        Family("gemma", "GemmaForCausalLM", gemma.parse_gemma, gemma.write_gemma),
        Family("gemma2", "Gemma2ForCausalLM", gemma.parse_gemma2, gemma.write_windowed_gemma, GEMMA2_WEIGHTS),
        Family("gemma3_text", "Gemma3ForCausalLM", gemma.parse_gemma3_text, gemma.write_windowed_gemma, GEMMA2_WEIGHTS),
        Family("phi3", "Phi3ForCausalLM", phi.parse_phi3, phi.write_phi3, PHI3_WEIGHTS),
        Family("smollm3", "SmolLM3ForCausalLM", dense.parse_smollm3, dense.write_smollm3),
        Family("granite", "GraniteForCausalLM", dense.parse_granite, dense.write_granite),
        Family("cohere", "CohereForCausalLM", dense.parse_cohere, dense.write_cohere),
        Family("cohere2", "Cohere2ForCausalLM", dense.parse_cohere2, dense.write_cohere),
        Family("stablelm", "StableLmForCausalLM", dense.parse_stablelm, dense.write_stablelm),
        Family("starcoder2", "Starcoder2ForCausalLM", dense.parse_starcoder2, dense.write_starcoder2, STARCODER2_WEIGHTS),
        Family("gpt_neox", "GPTNeoXForCausalLM", earlier.parse_gpt_neox, earlier.write_gpt_neox, GPT_NEOX_WEIGHTS),
        Family("falcon", "FalconForCausalLM", earlier.parse_falcon, earlier.write_falcon, FALCON_WEIGHTS),
        Family("glm4", "Glm4ForCausalLM", dense.parse_glm4, dense.write_glm4, GLM4_WEIGHTS),
        Family("exaone4", "Exaone4ForCausalLM", dense.parse_exaone4, dense.write_exaone4, OLMO2_WEIGHTS),
        Family("ernie4_5", "Ernie4_5ForCausalLM", dense.parse_ernie4_5, dense.write_ernie4_5),
        Family("seed_oss", "SeedOssForCausalLM", dense.parse_seed_oss, dense.write_seed_oss),
        Family("mixtral", "MixtralForCausalLM", experts.parse_mixtral, experts.write_mixtral, MIXTRAL_WEIGHTS),
        Family("qwen2_moe", "Qwen2MoeForCausalLM", experts.parse_qwen2_moe, experts.write_qwen_moe, QWEN2_MOE_WEIGHTS),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", experts.parse_qwen3_moe, experts.write_qwen_moe),
        Family("olmoe", "OlmoeForCausalLM", experts.parse_olmoe, experts.write_olmoe),
        Family("granitemoe", "GraniteMoeForCausalLM", experts.parse_granitemoe, experts.write_granitemoe, GRANITE_MOE_WEIGHTS),
        Family("glm4_moe", "Glm4MoeForCausalLM", experts.parse_glm4_moe, experts.write_glm4_moe),
        Family("minimax_m2", "MiniMaxM2ForCausalLM", experts.parse_minimax_m2, experts.write_minimax_m2, MINIMAX_WEIGHTS),
        Family("gpt_oss", "GptOssForCausalLM", experts.parse_gpt_oss, experts.write_gpt_oss, GPT_OSS_WEIGHTS),
        Family("deepseek_v2", "DeepseekV2ForCausalLM", latent.parse_deepseek_v2, latent.write_latent),
        Family("deepseek_v3", "DeepseekV3ForCausalLM", latent.parse_deepseek_v3, latent.write_latent),
        Family("kimi_k2", "DeepseekV3ForCausalLM", latent.parse_kimi_k2, latent.write_latent),
    )
}
"""Families that are planned, built, trained, served and written."""

PLANNED_FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", latent.parse_glm_moe_dsa),
        Family("gemma3", "Gemma3ForConditionalGeneration", gemma.parse_gemma3),
        Family("gemma4", "Gemma4ForConditionalGeneration", gemma.parse_gemma4),
        Family("gemma4_text", "Gemma4ForCausalLM", gemma.parse_gemma4_text),
        Family("phi", "PhiForCausalLM", phi.parse_phi, weights=PHI_WEIGHTS),
        Family("gptj", "GPTJForCausalLM", earlier.parse_gptj),
        Family("bloom", "BloomForCausalLM", earlier.parse_bloom),
        Family("opt", "OPTForCausalLM", earlier.parse_opt),
    )
}
"""Families that are planned only: the decoder and the engine refuse them by what they would have to compute."""

_ENCODER = "an encoder, in which every token sees those after it; nothing is generated token by token"
_BOTH = "an encoder with a decoder, which reads a prompt and writes an answer with different layers"
_RECURRENT = "a recurrent model with a state of fixed size instead of a KV cache"
_HYBRID = "a model that mixes attention with recurrent layers, whose state is not counted here"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "albert", "electra", "mpnet", "deberta", "xlm-roberta"), _ENCODER),
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "pegasus", "whisper"), _BOTH),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5"), _RECURRENT),
    **dict.fromkeys(("jamba", "recurrent_gemma", "zamba2", "bamba", "nemotron_h", "qwen3_next", "falcon_h1"), _HYBRID),
}
"""Kinds of model that are no decoder-only transformer, with the reason."""


EARLY_EXIT = "early_exit"
"""Our own key of a ``config.json``, of any family: ``ModelSpec.early_exit``."""


def all_families() -> dict[str, Family]:
    """Every family that can be planned; those of ``FAMILIES`` can also be trained and served."""
    return FAMILIES | PLANNED_FAMILIES


def weight_names(family: str) -> WeightNames:
    """How ``family`` names its matrices on disk; as Llama does where it is not known."""
    known = all_families().get(family)
    return LLAMA_WEIGHTS if known is None else known.weights


def layout(spec: ModelSpec) -> Iterator[Entry]:
    """Every tensor of a model of ``spec``, canonical beside stored. Raises ConfigError or UnsupportedFamilyError for a model
    that is not built here."""
    spec.require_buildable()
    if spec.family not in FAMILIES:
        raise UnsupportedFamilyError(f"family={spec.family!r} is not supported. Supported families: {', '.join(FAMILIES)}.")
    return tensors(spec, FAMILIES[spec.family].weights)


def _refuse_unknown(family: Any, config: dict[str, Any]) -> UnsupportedFamilyError:
    known = f"Supported families: {', '.join(FAMILIES)}; to plan only: {', '.join(PLANNED_FAMILIES)}."
    if family is None:
        why = "nothing says how its positions, norms, biases, MLP and output head are made, which the sizes alone do not tell"
        model = f" of {config['name']!r:.80}" if isinstance(config.get("name"), str) else ""
        return UnsupportedFamilyError(f"config.json{model} has no 'model_type': {why}. Add one. {known}")
    reason = f": it is {REFUSED[family]}" if isinstance(family, str) and family in REFUSED else ""
    near = difflib.get_close_matches(family, all_families(), n=2) if isinstance(family, str) and not reason else []
    guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UnsupportedFamilyError(f"model_type={family!r:.100} is not supported{reason}.{guess} {known}")


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """``ModelSpec`` of a Hugging Face ``config.json`` already parsed to a dictionary.

    Raises UnsupportedFamilyError, naming the supported families, the near ones and the reason where there is one, and
    ConfigError for a key that is missing or impossible.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in all_families():
        raise _refuse_unknown(family, config)
    notes: tuple[str, ...] = ()
    early_exit = Reader(config).flag(EARLY_EXIT, False)
    if has_short_keys(config):
        config, notes = with_family_keys(config)
        family = config["model_type"]
    scheme = checkpoint_scheme(config)
    spec = all_families()[family].parse(config)
    if not (scheme or notes or early_exit):
        return spec
    return spec.with_(checkpoint_scheme=scheme, notes=spec.notes + notes, early_exit=early_exit)


def config_from_spec(spec: ModelSpec, dtype: str = "float32") -> dict[str, Any]:
    """A ``config.json`` dictionary that transformers, vLLM and llama.cpp's converter read. ``dtype`` is torch's spelling."""
    if spec.family in PLANNED_FAMILIES:
        raise UnsupportedFamilyError(f"family={spec.family!r} can be planned but not written: no model of it is built yet.")
    if spec.family not in FAMILIES:
        raise UnsupportedFamilyError(f"family={spec.family!r} is not supported. Supported families: {', '.join(FAMILIES)}.")
    spec.require_buildable()
    family = FAMILIES[spec.family]
    assert family.write is not None
    eos: int | list[int] | None = None
    if spec.eos_token_ids:
        eos = spec.eos_token_ids[0] if len(spec.eos_token_ids) == 1 else list(spec.eos_token_ids)
    config = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.write(spec),
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }
    _refuse_loss(spec, family.parse(config))
    return config | {EARLY_EXIT: True} if spec.early_exit else config


def _refuse_loss(spec: ModelSpec, written: ModelSpec) -> None:
    """ConfigError where ``written``, read back from the config.json made of ``spec``, describes another model."""
    for field in dataclasses.fields(spec):
        if field.name in ("sliding_window", "sliding_window_layers") or not field.compare:
            continue  # one window is spelled in several ways: compared by layer below; the others say where a spec came from
        if field.name == "rope" and spec.positions != "rope":
            continue
        asked, kept = getattr(spec, field.name), getattr(written, field.name)
        if asked != kept:
            raise ConfigError(
                f"{field.name}={asked!r} cannot be written as family={spec.family!r}, whose config.json means {kept!r}."
            )
    for layer in range(spec.n_layers):
        asked, kept = spec.window_of_layer(layer), written.window_of_layer(layer)
        if asked != kept:
            raise ConfigError(
                f"sliding_window={asked} of layer {layer} cannot be written as family={spec.family!r}, which means {kept}."
            )
