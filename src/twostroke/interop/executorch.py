"""Writes ExecuTorch programs (.pte) for its XNNPACK backend, by ``torch.export`` and the executorch package.

The program answers as its text runners expect (pytorch/executorch, ``extension/llm/runner``): ``forward(tokens (1, T),
start (1))`` gives logits (1, V) of the last token and keeps the KV cache in itself; a start of 0 begins anew. Constant methods
tell a runner the sizes and the ids that end a text. The cache's memory must begin as zeros, as that of ExecuTorch's ``Module``
does: a weight of zero times what is not a number is not zero.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from twostroke.interop.export_targets import ExportSource
from twostroke.interop.static_decoder import GROUP, StaticDecoder, is_rounded, notes_of, require_groups, write_companions

MODEL = "model.pte"
_BITS = {"int8": 8, "int4": 4}


class _WithCache(nn.Module):
    """The decoder with its cache as buffers that a call changes."""

    def __init__(self, decoder: StaticDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        for layer, pair in enumerate(decoder.empty_cache()):
            for kind, zeros in zip("kv", pair, strict=True):
                self.register_buffer(f"{kind}_{layer}", zeros)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        cache = [(getattr(self, f"k_{i}"), getattr(self, f"v_{i}")) for i in range(self.decoder.spec.n_layers)]
        positions = start + torch.arange(tokens.shape[1])
        logits, after = self.decoder(tokens, positions, cache)
        for old, new in zip(cache, after, strict=True):
            for buffer, now in zip(old, new, strict=True):
                buffer.copy_(now)
        return logits


def write_executorch(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with the program, the tokenizer and the configuration. In int8 and int4 inputs of products are rounded to 8
    bits a token as they come; int4 is symmetric in groups of 32 with a head in 8 bits, the embedding is fp32. Memory:
    several times the model in fp32. Raises ConfigError in int4 if 32 does not divide what its products read."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    spec = source.spec
    if precision == "int4":
        require_groups(spec, "executorch")
    decoder = StaticDecoder(source).eval()
    if precision in _BITS:
        _round(decoder, _BITS[precision])
    program = _WithCache(decoder)
    n_tokens = torch.export.Dim("n_tokens", min=1, max=decoder.n_context - 1)
    example = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    constants = {
        "get_max_seq_len": decoder.n_context,
        "get_max_context_len": decoder.n_context,
        "get_vocab_size": spec.vocab_size,
        "get_n_layers": spec.n_layers,
        "get_bos_id": -1 if spec.bos_token_id is None else spec.bos_token_id,
        "get_eos_ids": list(spec.eos_token_ids),
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": True,
    }
    with torch.no_grad(), source.stage("tracing"):
        traced = torch.export.export(program, example, dynamic_shapes=({1: n_tokens}, None))
    with torch.no_grad(), source.stage("lowering for XNNPACK"):
        lowered = to_edge_transform_and_lower(traced, partitioner=[XnnpackPartitioner()], constant_methods=constants)
    with source.stage("writing the program"), (out / MODEL).open("wb") as stream:
        lowered.to_executorch().write_to_file(stream)
    write_companions(source, out)
    return notes_of(spec)


def _round(decoder: StaticDecoder, bits: int) -> None:
    """Weights of all products as integers, by torchao."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, MappingType, PerAxis, PerGroup, quantize_

    def config(bits: int) -> Int8DynamicActivationIntxWeightConfig:
        kind: torch.dtype = getattr(torch, f"int{bits}")
        granularity = PerGroup(GROUP) if bits == 4 else PerAxis(0)
        return Int8DynamicActivationIntxWeightConfig(
            weight_dtype=kind, weight_granularity=granularity, weight_mapping_type=MappingType.SYMMETRIC_NO_CLIPPING_ERR
        )

    quantize_(decoder.decoder.blocks, config(bits), is_rounded)
    quantize_(decoder.head, config(8))
