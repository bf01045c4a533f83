"""Weight names of ``LlamaForCausalLM``, which Mistral, Qwen2 and Qwen3 share."""

from __future__ import annotations

from collections.abc import Iterator

from twostroke.core.spec import ModelSpec
from twostroke.model.families.layout import Entry, Part, whole


def layout(spec: ModelSpec) -> Iterator[Entry]:
    E, F, D = spec.d_model, spec.d_ff, spec.head_dim
    q_rows, kv_rows = spec.n_heads * D, spec.n_kv_heads * D
    yield whole("embed.weight", "model.embed_tokens.weight", spec.vocab_size, E)
    for i in range(spec.n_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield whole(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", E)
        for suffix, columns in (("weight", (E,)), ("bias", ())) if spec.qkv_bias else (("weight", (E,)),):
            yield Entry(
                f"{ours}.attn.qkv.{suffix}",
                (spec.qkv_rows, *columns),
                (
                    Part(f"{theirs}.self_attn.q_proj.{suffix}", q_rows),
                    Part(f"{theirs}.self_attn.k_proj.{suffix}", kv_rows),
                    Part(f"{theirs}.self_attn.v_proj.{suffix}", kv_rows),
                ),
            )
        if spec.qk_norm:
            yield whole(f"{ours}.attn.q_norm.weight", f"{theirs}.self_attn.q_norm.weight", D)
            yield whole(f"{ours}.attn.k_norm.weight", f"{theirs}.self_attn.k_norm.weight", D)
        yield whole(f"{ours}.attn.out.weight", f"{theirs}.self_attn.o_proj.weight", E, q_rows)
        if spec.attn_out_bias:
            yield whole(f"{ours}.attn.out.bias", f"{theirs}.self_attn.o_proj.bias", E)
        yield whole(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", E)
        for suffix, columns in (("weight", (E,)), ("bias", ())) if spec.mlp_bias else (("weight", (E,)),):
            gate, up = Part(f"{theirs}.mlp.gate_proj.{suffix}", F), Part(f"{theirs}.mlp.up_proj.{suffix}", F)
            yield Entry(f"{ours}.mlp.gate_up.{suffix}", (2 * F, *columns), (gate, up))
        yield whole(f"{ours}.mlp.down.weight", f"{theirs}.mlp.down_proj.weight", E, F)
        if spec.mlp_bias:
            yield whole(f"{ours}.mlp.down.bias", f"{theirs}.mlp.down_proj.bias", E)
    yield whole("final_norm.weight", "model.norm.weight", E)
    if not spec.tied_embeddings:
        yield whole("head.weight", "lm_head.weight", spec.vocab_size, E)
