"""Weight names of ``GPT2LMHeadModel``. Its Conv1D matrices are stored as (inputs, outputs), so every one is transposed."""

from __future__ import annotations

from collections.abc import Iterator

from twostroke.core.spec import ModelSpec
from twostroke.model.families.layout import Entry, whole


def layout(spec: ModelSpec) -> Iterator[Entry]:
    E, F = spec.d_model, spec.d_ff
    yield whole("embed.weight", "transformer.wte.weight", spec.vocab_size, E)
    yield whole("position_embed.weight", "transformer.wpe.weight", spec.max_positions, E)
    for i in range(spec.n_layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        # c_attn holds queries, keys and values in the canonical order already.
        matrices = (
            (f"{ours}.attn.qkv", f"{theirs}.attn.c_attn", spec.qkv_rows, E),
            (f"{ours}.attn.out", f"{theirs}.attn.c_proj", E, spec.n_heads * spec.head_dim),
            (f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", F, E),
            (f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", E, F),
        )
        for canonical, stored, rows, columns in matrices:
            yield whole(f"{canonical}.weight", f"{stored}.weight", rows, columns, transposed=True)
            yield whole(f"{canonical}.bias", f"{stored}.bias", rows)
        for canonical, stored in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
            yield whole(f"{ours}.{canonical}.weight", f"{theirs}.{stored}.weight", E)
            yield whole(f"{ours}.{canonical}.bias", f"{theirs}.{stored}.bias", E)
    yield whole("final_norm.weight", "transformer.ln_f.weight", E)
    yield whole("final_norm.bias", "transformer.ln_f.bias", E)
    if not spec.tied_embeddings:
        yield whole("head.weight", "lm_head.weight", spec.vocab_size, E)
