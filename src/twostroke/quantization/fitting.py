"""4-bit codes of a whole model, block after block, each fitted to what the blocks before it really bring; and what that costs.

Two streams of activations run side by side, the exact model's and the rounded one's. A matrix W that gives W·x in the one
reads x̂ in the other, so it is first moved towards W·(Σ x·x̂ᵀ)·(Σ x̂·x̂ᵀ)⁻¹, which brings the exact output back from the rounded
input (Li et al. 2025, "GPTAQ", arXiv:2504.02692), then rounded with compensation for x̂. Rows that nothing is fitted to are
judged at the end of both streams; where they differ by more than is allowed, the matrices that matter most for their size go to
int8.

KL to the exact model in 1e-3 nats a token on held-out stories, stories260K, groups of 64, measured in this order: all matrices
on exact inputs 94; scales beforehand and largest inputs first 86; rounded inputs 88; moved half way 66, moved all the way 67.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from twostroke.kernels.features import has_packed_linear
from twostroke.kernels.int4 import dequantize_groups
from twostroke.kernels.matrix import quantize_columns
from twostroke.model.attention import attention_mask, must_be_explicit
from twostroke.model.rope import tables_by_layer
from twostroke.planner.work.params import count_parameters
from twostroke.quantization.gptq import round_with_compensation

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8

    from twostroke.model.decoder import Decoder

MAX_KL_NATS = 0.02
"""KL(exact ‖ rounded) a token above which matrices go to int8: two thirds of the 3% of perplexity that int4 may cost."""

PASSES = 3
"""Most times that the model is rounded, each time with more matrices in int8."""

LARGE_PARAMETERS = 100e6
"""Above it blocks are computed in bf16 where the processor has products of it: both streams alike, and many times as fast."""

SENSITIVITY_TOKENS = 1024
"""Tokens by which single matrices are judged; their order is all that is asked."""

Codes = tuple["UInt8[Tensor, 'n k']", "Float[Tensor, 'n groups']", "UInt8[Tensor, 'n groups']"]
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Judgement:
    """On ``n_tokens`` tokens that nothing was fitted to, rounding of activations left out: KL(exact ‖ rounded) in nats a token,
    and the rounded model's perplexity divided by the exact one's."""

    kl_nats: float
    perplexity_ratio: float
    n_tokens: int


@dataclass(frozen=True)
class Fitted:
    """``codes`` by canonical name; ``int8`` names the matrices that are better held in int8. ``judgement`` is None where the
    text was a single row."""

    codes: dict[str, Codes]
    int8: frozenset[str]
    judgement: Judgement | None
    n_tokens: int


@torch.inference_mode()
def fit_codes(
    decoder: Decoder,
    batches: Sequence[Int[Tensor, "B T"]],
    group: int,
    max_kl_nats: float = MAX_KL_NATS,
    progress: Progress | None = None,
) -> Fitted:
    """Codes for all matrices of ``decoder``'s blocks, fitted to seven eighths of ``batches`` and judged on the rest.

    The decoder is left as it was. Memory beside it: the codes (a byte a weight), one block twice, sums of its inputs in fp64,
    and the activations of all tokens between two blocks, twice.
    """
    tell = progress or (lambda done, note: None)
    rows = torch.cat(list(batches))
    n_judged = len(rows) // 8 or min(1, len(rows) - 1)
    fitted_to, judged = rows[: len(rows) - n_judged], rows[len(rows) - n_judged :]
    int8: frozenset[str] = frozenset()
    allowed = max_kl_nats
    sensitivity: dict[str, float] = {}
    for number in range(PASSES):
        one = _Pass(decoder, group, int8, fitted_to, judged)
        codes = one.run(tell)
        judgement = one.judgement()
        if judgement is None or judgement.kl_nats <= max_kl_nats or number == PASSES - 1:
            break
        if not sensitivity:
            sensitivity = _sensitivities(decoder, judged, codes, group, tell)
        # What single matrices cost adds up to what all of them cost but for a factor, which the last pass shows.
        left = sum(value for name, value in sensitivity.items() if name not in int8)
        factor = judgement.kl_nats / max(left, 1e-12)
        allowed = allowed if number == 0 else allowed * max_kl_nats / judgement.kl_nats
        int8 = _promoted(sensitivity, {name: c[0].numel() for name, c in codes.items()} | one.sizes, int8, allowed / factor)
    return Fitted(codes, int8, judgement, fitted_to.numel())


def _promoted(sensitivity: dict[str, float], sizes: dict[str, int], already: frozenset[str], allowed: float) -> frozenset[str]:
    """``already`` and the matrices with the most harm a weight, until the harm of those left is at most ``allowed``."""
    chosen = set(already)
    left = sum(value for name, value in sensitivity.items() if name not in chosen)
    for name in sorted(sensitivity, key=lambda n: sensitivity[n] / sizes[n], reverse=True):
        if left <= allowed:
            break
        if name not in chosen:
            chosen.add(name)
            left -= sensitivity[name]
    return frozenset(chosen)


class _Pass:
    """Both streams through all blocks once."""

    def __init__(self, decoder: Decoder, group: int, int8: frozenset[str], fitted_to: Tensor, judged: Tensor) -> None:
        self.decoder, self.group, self.int8, self.judged = decoder, group, int8, judged
        self.walk = _Walk(decoder, fitted_to.shape[1])
        self.n_fitted = -(-len(fitted_to) // _Walk.ROWS)
        self.exact = [self.walk.embed(t) for part in (fitted_to, judged) for t in part.split(_Walk.ROWS)]
        self.rounded = [x.clone() for x in self.exact]
        self.sizes: dict[str, int] = {}

    def run(self, tell: Progress) -> dict[str, Codes]:
        codes: dict[str, Codes] = {}
        blocks = self.decoder.blocks
        for i, block in enumerate(blocks):
            own = copy.deepcopy(block)
            for j, name in enumerate(_linears(block)):
                canonical = f"blocks.{i}.{name}.weight"
                tell((i + j / 4) / len(blocks), canonical)
                weight = _weight(block, name).float()
                self.sizes[canonical] = weight.numel()
                if canonical in self.int8:
                    rounded = _int8_values(weight)
                else:
                    codes[canonical] = self._codes(i, block, own, name, weight)
                    rounded = dequantize_groups(*codes[canonical], self.group)
                _weight(own, name).copy_(rounded)
            self.exact = [self.walk.block(i, block, x) for x in self.exact]
            self.rounded = [self.walk.block(i, own, x) for x in self.rounded]
        return codes

    def _codes(self, i: int, exact: nn.Module, rounded: nn.Module, name: str, weight: Tensor) -> Codes:
        k = weight.shape[1]
        hessian, cross = torch.zeros(k, k), torch.zeros(k, k)
        for x, y in zip(self.exact[: self.n_fitted], self.rounded[: self.n_fitted], strict=True):
            wanted = self.walk.inputs(i, exact, name, x)
            found = self.walk.inputs(i, rounded, name, y)
            hessian += found.t() @ found
            cross += (wanted - found).t() @ found
        return round_with_compensation(weight, hessian, self.group, cross)

    def judgement(self) -> Judgement | None:
        if not len(self.judged):
            return None
        exact = (x for x in self.exact[self.n_fitted :])
        rounded = (x for x in self.rounded[self.n_fitted :])
        return _judge(self.decoder, exact, rounded, self.judged)


class _Walk:
    """The decoder's forward pass a block at a time: what ``Decoder.hidden`` does between the embedding and the last norm."""

    ROWS = 8

    def __init__(self, decoder: Decoder, n_tokens: int) -> None:
        self.decoder, spec = decoder, decoder.spec
        self.positions = torch.arange(n_tokens)[None]
        self.ropes = tables_by_layer(spec, self.positions)
        windows = [spec.window_of_layer(i) for i in range(spec.n_layers)]
        device, dtype = torch.device("cpu"), torch.float32
        explicit = must_be_explicit(spec, device, dtype, n_tokens, training=False)
        masks = {w: attention_mask(n_tokens, w, None, device, dtype, explicit) for w in set(windows)}
        self.masks = [masks[w] for w in windows]
        self.in_bf16 = count_parameters(spec).total > LARGE_PARAMETERS and has_packed_linear(torch.bfloat16)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T E"]:
        x = self.decoder.embedded(tokens)
        return x if self.decoder.position_embed is None else x + self.decoder.position_embed(self.positions)

    def block(self, i: int, block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.in_bf16):
            result: Tensor = block(x, self.ropes[i], self.masks[i])
        return result

    def inputs(self, i: int, block: nn.Module, name: str, x: Float[Tensor, "B T E"]) -> Float[Tensor, "rows k"]:
        """What the matrix ``name`` reads; the block is not computed beyond it."""

        def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise _ReachedError(inputs[0].flatten(0, -2).float())

        handle = block.get_submodule(name).register_forward_pre_hook(stop)
        try:
            self.block(i, block, x)
        except _ReachedError as reached:
            return reached.rows
        finally:
            handle.remove()
        raise AssertionError(f"{name} is not part of its block's computation")


class _ReachedError(Exception):
    """Ends a block's computation at the matrix that was asked for."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


def _linears(block: nn.Module) -> list[str]:
    """Names of a block's matrices in the order in which they are computed."""
    return [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]


def _weight(block: nn.Module, name: str) -> Tensor:
    return block.get_parameter(f"{name}.weight")


def _int8_values(weight: Tensor) -> Tensor:
    codes, scale = quantize_columns(weight)
    return codes * scale[:, None]


def _judge(decoder: Decoder, exact: Iterator[Tensor], rounded: Iterator[Tensor], tokens: Tensor) -> Judgement:
    divergence, worse, n_next = 0.0, 0.0, 0
    ids = (row for row in tokens)
    for x, y in zip(exact, rounded, strict=True):
        for one, other in zip(x, y, strict=True):
            p, q = (decoder.logits(decoder.read_out(s)).float().log_softmax(-1) for s in (one, other))
            divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            targets = next(ids)[1:, None]
            worse += float((p[:-1].gather(1, targets) - q[:-1].gather(1, targets)).sum(dtype=torch.float64))
            n_next += len(targets)
    return Judgement(divergence / tokens.numel(), math.exp(worse / n_next), tokens.numel())


def _sensitivities(decoder: Decoder, judged: Tensor, codes: dict[str, Codes], group: int, tell: Progress) -> dict[str, float]:
    """KL of the model with one matrix rounded, for each of ``codes``; less than nothing cannot be."""
    rows = judged[: max(1, SENSITIVITY_TOKENS // judged.shape[1])]
    walk = _Walk(decoder, rows.shape[1])
    streams = [walk.embed(rows)]
    for i, block in enumerate(decoder.blocks):
        streams.append(walk.block(i, block, streams[-1]))
    found: dict[str, float] = {}
    for n_done, (canonical, held) in enumerate(codes.items()):
        tell(n_done / len(codes), f"what {canonical} costs")
        _, number, name = canonical.removesuffix(".weight").split(".", 2)
        first = int(number)
        own = copy.deepcopy(decoder.blocks[first])
        _weight(own, name).copy_(dequantize_groups(*held, group))
        x = walk.block(first, own, streams[first])
        for i in range(first + 1, len(decoder.blocks)):
            x = walk.block(i, decoder.blocks[i], x)
        found[canonical] = max(0.0, _judge(decoder, iter([streams[-1]]), iter([x]), rows).kl_nats)
    return found
