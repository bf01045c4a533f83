"""Writes LiteRT programs (.tflite), by the litert-torch package.

Two signatures, ``prefill_128`` and ``decode``, of 128 tokens and of one. Inputs: ``tokens`` (1, T) and ``input_pos`` (T), both
int32, and of each layer ``kv_cache_k_i`` and ``kv_cache_v_i`` (1, K, S, D). Outputs: ``logits`` (1, V) of the last token and
the caches as they become. Names are those of google-ai-edge/litert-torch's own models. A prompt's rest below 128 tokens goes
through ``decode``.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from twostroke.core.aside import require_space
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.moved import Held, Made
from twostroke.interop.static_decoder import StaticDecoder, expect_program, notes_of, require_groups, write_companions

MODEL = "model.tflite"
PREFILL = 128


class _WithNames(nn.Module):
    """The decoder with its cache as named inputs and outputs."""

    def __init__(self, decoder: StaticDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, input_pos: Tensor, **cache: Tensor) -> dict[str, Tensor]:
        n_layers = self.decoder.spec.n_layers
        pairs = [(cache[f"kv_cache_k_{i}"], cache[f"kv_cache_v_{i}"]) for i in range(n_layers)]
        logits, after = self.decoder(tokens, input_pos, pairs)
        return {"logits": logits} | named(after)


def named(cache: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The tensors of ``cache`` under the program's names."""
    return {f"kv_cache_{kind}_{i}": one for i, pair in enumerate(cache) for kind, one in zip("kv", pair, strict=True)}


def expect_litert(source: ExportSource, held: Held, precision: str) -> Made:
    """What the program holds, nearly. Each signature has of an output in 8 bits a scale in fp32 and a zero point of 8 bytes;
    scales of groups are fp16. Of a table that is embedding and head, ai-edge-quantizer writes both once a signature, in numbers
    and in codes. What the graph takes, 50 to 60 KB a layer, is not counted."""
    made, spec = expect_program(source, held, precision, output_bytes=2 * 12.0, group_bytes=2.0, one_table=True), source.spec
    twice = (4.0 + 1.0) * spec.vocab_size * spec.d_model if spec.tied_embeddings and precision != "fp32" else 0.0
    return replace(made, n_bytes=made.n_bytes + twice)


def write_litert(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with the program, the tokenizer and the configuration. In int8 and int4 inputs of products are rounded to 8
    bits a token as they come; int4 is symmetric in groups of 32 with a head in 8 bits. Memory: several times the model in
    fp32. Raises OSError if the program in fp32 does not fit on the disk, ConfigError in int4 if 32 does not divide what its
    products read."""
    import litert_torch

    if precision == "int4":
        require_groups(source.spec, "litert")
    program = _WithNames(StaticDecoder(source).eval()).eval()
    n_prefilled = min(PREFILL, program.decoder.n_context)
    litert_torch.config.show_progress = False
    converter = litert_torch.Converter()
    for name, n_tokens in ((f"prefill_{n_prefilled}", n_prefilled), ("decode", 1)):
        tokens = torch.zeros(1, n_tokens, dtype=torch.int32)
        inputs = {"tokens": tokens, "input_pos": torch.arange(n_tokens, dtype=torch.int32)}
        converter.add_signature(name, program, sample_kwargs=inputs | named(program.decoder.empty_cache()))
    parameters = {id(one): one.nbytes for one in program.parameters()}
    require_space(out, sum(parameters.values()))  # the package's compiler ends the process if a write fails
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        with source.stage("tracing and converting"):
            converter.convert().export(str(out / MODEL))
        if precision != "fp32":
            with source.stage("rounding"):
                _round(out / MODEL, precision)
    write_companions(source, out)
    return notes_of(source.spec)


def _round(file: Path, precision: str) -> None:
    """Weights of all products as integers, by ai-edge-quantizer."""
    from ai_edge_quantizer import qtyping, quantizer

    product = qtyping.TFLOperationName.FULLY_CONNECTED
    rounding = quantizer.Quantizer(str(file))
    if precision == "int4":
        rounding.add_dynamic_config(".*", product, 4, qtyping.QuantGranularity.BLOCKWISE_32)
        rounding.add_dynamic_config(".*(_head|logits_output).*", product, 8)  # it has the output's name if it is the last
    else:
        rounding.add_dynamic_config(".*", product, 8)
    rounding.quantize().export_model(str(file), overwrite=True)
