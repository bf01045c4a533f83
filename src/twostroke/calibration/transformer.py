"""Measures the pieces of training: one decoder block forward and backward, what surrounds the blocks, the loss, optimizers.

The planner knows how many operations a block's attention has, and how many bytes its norms, rotation, sums and activation move.
It cannot know how fast this machine's kernels do that, fused by a compiler or not. So the model's own block runs at two
sequence lengths with the same number of tokens, and the times of its products, measured by themselves, are subtracted. The rest
is a + c·keys, because only attention grows with the keys it takes. No constant is fitted to a training run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.calibration.timing import Clock
from twostroke.core.matrices import block_matrices, layer_kinds, pair_flops
from twostroke.core.policy import LOSS_CHUNK_ROWS, computed_type, multiplies_bf16
from twostroke.core.profile import read_fingerprint
from twostroke.core.rates import BlockRates, Direction, Mode, TrainingRates
from twostroke.core.spec import ModelSpec
from twostroke.kernels.nf4 import dequantize_nf4, quantize_nf4
from twostroke.model.decoder import Decoder
from twostroke.planner.training.memory import keys_walked
from twostroke.planner.training.passes import newton_schulz_products, optimizer_bytes_moved, setup_bytes
from twostroke.planner.work.flops import elementwise_elements
from twostroke.training.muon import muon_class
from twostroke.training.stochastic_rounding import Noise, RoundedUpdates

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTHS = {"fp32": 4, "bf16": 2}

LEAST_SHARE = 0.05
"""Noise can bring a difference of two times near zero or below. It is then set to this share of the larger time, because no
rate is infinite."""

Pair = tuple[float, float]
"""Seconds of a forward and of its backward."""


def mixed_type(device: str) -> str:
    """The type that a recipe's bf16 is computed in on "cpu" or "cuda": fp32 on a processor without fast products of bf16."""
    return computed_type("bf16", multiplies_bf16(device, read_fingerprint().isa))


@dataclass(frozen=True)
class BlockSize:
    """The block that runs: a Llama block of E = 64·heads on ``tokens`` tokens, once in rows of ``short`` tokens and once in
    rows of ``long``. The loss has a vocabulary of ``vocab_size``."""

    heads: int = 4
    d_ff: int = 704
    tokens: int = 4096
    eager_tokens: int = 2048
    short: int = 256
    long: int = 1024
    vocab_size: int = 4096
    chunk_rows: int = LOSS_CHUNK_ROWS

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="llama",
            vocab_size=self.vocab_size,
            n_layers=1,
            d_model=64 * self.heads,
            n_heads=self.heads,
            n_kv_heads=self.heads,
            head_dim=64,
            d_ff=self.d_ff,
            max_positions=self.long,
            tied_embeddings=True,
        )


def straight_line(short: float, long: float, at_short: float, at_long: float) -> tuple[float, float]:
    """(a, c) of a + c·x through two measurements. Each part is at least ``LEAST_SHARE`` of what was measured at ``short``."""
    slope = (at_long - at_short) / (long - short)
    slope = min(max(slope, LEAST_SHARE * at_short / short), (1 - LEAST_SHARE) * at_short / short)
    return at_short - slope * short, slope


# -- one block ------------------------------------------------------------------------------------------------------------


def _products_pass(clock: Clock, size: BlockSize, dtype: str, rows: int) -> Pair:
    """Seconds of the block's four products by themselves, in the block's shapes."""
    forward_s = backward_s = 0.0
    for product in block_matrices(size.spec):
        x = torch.randn(rows, product.k, device=clock.device).to(DTYPES[dtype])
        weight = torch.randn(product.n, product.k, device=clock.device).to(DTYPES[dtype])
        upstream = torch.randn(rows, product.n, device=clock.device).to(DTYPES[dtype])
        forward_s += clock.best_s(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
        backward_s += clock.best_s(lambda u=upstream, weight=weight: u @ weight)  # type: ignore[misc]
        backward_s += clock.best_s(lambda u=upstream, x=x: u.t() @ x)  # type: ignore[misc]
    return forward_s, backward_s


def _inputs(size: BlockSize, rows: int, length: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, positions, documents) of a packed batch in which every row is one document."""
    tokens = torch.randint(0, size.vocab_size, (rows, length), device=device)
    positions = torch.arange(length, device=device)[None].expand(rows, length)
    return tokens, positions, torch.zeros(rows, length, dtype=torch.int32, device=device)


def _block_arguments(decoder: Decoder, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[object, ...]:
    """What the decoder passes to its first block. This file then need not know how masks and tables are made."""
    seen: list[tuple[object, ...]] = []
    hook = decoder.blocks[0].register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    with torch.no_grad():
        decoder.hidden(*inputs)
    hook.remove()
    return seen[0]


def _both_ways(clock: Clock, module: nn.Module, run: Callable[[], Tensor], seconds: float, least: int) -> Pair:
    """Seconds of forward and backward of ``run``, including the gradients of ``module``'s parameters."""
    upstream = torch.randn_like(run())

    def backward(result: object) -> None:
        assert isinstance(result, Tensor)
        result.backward(upstream)
        for parameter in module.parameters():
            parameter.grad = None

    return clock.best_of_two_s(run, backward, seconds, least)


def _block_pass(clock: Clock, decoder: Decoder, arguments: tuple[object, ...], seconds: float, least: int) -> Pair:
    x, *others = arguments
    assert isinstance(x, Tensor)
    entry = x.detach().requires_grad_()

    def run() -> Tensor:
        entry.grad = None
        result: Tensor = decoder.blocks[0](entry, *others)
        return result

    return _both_ways(clock, decoder, run, seconds, least)


def _rates(
    size: BlockSize, dtype: str, mode: Mode, tokens: int, device: str, shorter: Pair, longer: Pair
) -> Iterator[BlockRates]:
    """Rates of attention and of elementwise operations, forward and backward. ``shorter`` and ``longer`` are what is left of a
    block's times at the two lengths without its products."""
    flops_per_key = float(tokens * pair_flops(size.spec))
    kind = "gpu" if device == "cuda" else "cpu"
    few, many = keys_walked(kind, dtype, size.short), keys_walked(kind, dtype, size.long)
    directions: tuple[tuple[Direction, float], ...] = (("forward", 1.0), ("backward", 2.5))
    for i, (direction, products) in enumerate(directions):
        rest, per_key = straight_line(few, many, shorter[i], longer[i])
        elements = elementwise_elements(size.spec, layer_kinds(size.spec)[0][0], direction == "backward")
        moved = tokens * WIDTHS[dtype] * sum(elements.values())
        yield BlockRates(dtype, mode, direction, products * flops_per_key / per_key, moved / rest)


def _decoder(size: BlockSize, dtype: str, device: str, qk_norm: bool = False) -> Decoder:
    return Decoder(size.spec.with_(qk_norm=qk_norm), DTYPES[dtype], device).train()


def _whole_block(clock: Clock, size: BlockSize, dtype: str, mode: str, tokens: int, length: int, qk_norm: bool) -> Pair:
    """(forward, backward) seconds of one block on rows of ``length``."""
    decoder = _decoder(size, dtype, clock.device, qk_norm)
    inputs = _inputs(size, max(1, tokens // length), length, clock.device)
    arguments = _block_arguments(decoder, inputs)  # before compiling, because a pass without gradients is another graph
    if mode == "compiled":
        decoder.blocks[0].compile(dynamic=False)
    return _block_pass(clock, decoder, arguments, 0.4, 4)


def measure_block(clock: Clock, size: BlockSize, dtype: str, mode: Mode) -> Iterator[BlockRates]:
    """Attention and elementwise rates of a block in ``dtype``, forward and backward, and that of QK-norm, in elements normed
    per second, from the same block with QK-norm. QK-norm has its own rate, because in a compiled block it costs far more than
    its bytes: one core took 112 ms for a backward without it and 132 with it."""
    tokens = size.tokens if mode == "compiled" else size.eager_tokens
    products = _products_pass(clock, size, dtype, tokens)
    plain = [_whole_block(clock, size, dtype, mode, tokens, length, False) for length in (size.short, size.long)]
    normed = _whole_block(clock, size, dtype, mode, tokens, size.short, True)

    def left(whole: Pair, of: Pair) -> Pair:
        forward, backward = (max(w - o, LEAST_SHARE * w) for w, o in zip(whole, of, strict=True))
        return forward, backward

    both = _rates(size, dtype, mode, tokens, clock.device, left(plain[0], products), left(plain[1], products))
    elements = tokens * 2.0 * size.heads * 64
    for rates, with_norm, without in zip(both, normed, plain[0], strict=True):
        # So small a part may vanish in noise. It is then taken as a thousandth of the block.
        extra_s = max(with_norm - without, 1e-3 * without)
        yield replace(rates, head_norm_element_per_s=elements / extra_s)


HALF_ROWS = 2


def half_blocks(clock: Clock, size: BlockSize, blocks: Sequence[BlockRates]) -> Iterator[BlockRates]:
    """Rates of fp16 blocks: those of bf16 ``blocks``, whose elementwise work is as wide and in fp32 inside too, with fp16's own
    attention, whose backward multiplies in the slow layouts. It is measured on ``HALF_ROWS`` rows of the short length, under a
    mask."""
    spec, length = size.spec, size.short
    shape = (HALF_ROWS, spec.n_heads, length, spec.head_dim)
    q, k, v = (torch.randn(shape, device=clock.device).to(torch.float16).requires_grad_() for _ in range(3))
    mask = torch.zeros(HALF_ROWS, 1, length, length, device=clock.device, dtype=torch.float16)
    upstream = torch.randn(shape, device=clock.device).to(torch.float16)

    def backward(result: object) -> None:
        assert isinstance(result, Tensor)
        torch.autograd.grad(result, (q, k, v), upstream)

    forward_s, backward_s = clock.best_of_two_s(lambda: F.scaled_dot_product_attention(q, k, v, mask), backward, 0.2, 3)
    walked = float(HALF_ROWS * length * pair_flops(spec) * length)
    rates = {"forward": walked / forward_s, "backward": 2.5 * walked / backward_s}
    for block in blocks:
        if block.dtype == "bf16":
            yield replace(block, dtype="fp16", attention_flop_per_s=rates[block.direction])


@contextlib.contextmanager
def empty_compile_cache() -> Iterator[None]:
    """Gives torch's compiler an empty cache in a new folder, which is removed at the end."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="twostroke-compile-", ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def start_compiler(device: str) -> bool:
    """Compile next to nothing, and return whether that works. What the compiler does once on a machine with an empty cache
    (probing the processor and preparing headers takes 18 s) is then in no measurement."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    try:
        torch.compile(lambda y: (y.sin() * y).sum(), dynamic=False)(x).backward()
    except Exception:  # torch's compiler, the C++ compiler and Triton may raise anything
        return False
    return True


def measure_setup(clock: Clock, size: BlockSize, rates: TrainingRates) -> TrainingRates:
    """``rates`` with those of what surrounds the blocks, which is never compiled: embedding, rotary tables and final norm, in
    bytes/s of the planner's count, and the mask, in elements of B·T² per second. They are the differences between a decoder and
    its one block, at both lengths."""
    around: list[Pair] = []
    rows = 0
    for length in (size.short, size.long):
        decoder = _decoder(size, mixed_type(clock.device), clock.device)
        rows = max(1, size.eager_tokens // length)
        inputs = _inputs(size, rows, length, clock.device)
        whole = _both_ways(clock, decoder, lambda d=decoder, i=inputs: d.hidden(*i), 0.4, 4)  # type: ignore[misc]
        block = _block_pass(clock, decoder, _block_arguments(decoder, inputs), 0.4, 4)
        forward, backward = (max(w - b, LEAST_SHARE * w / 4) for w, b in zip(whole, block, strict=True))
        around.append((forward, backward))
    tokens = rows * size.long
    fixed_s, per_key_s = straight_line(size.short, size.long, around[0][0], around[1][0])
    return replace(
        rates,
        setup_forward_bytes_per_s=setup_bytes(size.spec, tokens, WIDTHS[mixed_type(clock.device)], False) / fixed_s,
        setup_backward_bytes_per_s=setup_bytes(size.spec, tokens, WIDTHS[mixed_type(clock.device)], True)
        / min(around[0][1], around[1][1]),
        mask_element_per_s=tokens / per_key_s,
    )


# -- loss and optimizers --------------------------------------------------------------------------------------------------


OPTIMIZER_BLOCKS = 8
"""The AdamW update is timed on the matrices of so many blocks: 6M parameters, some 130 MB with their state."""


def chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of some rows, and the gradient of their logits: the work of ``training.loss.chunk_loss``."""
    logits = F.linear(hidden, weight).float()
    log_total = logits.logsumexp(dim=-1)
    is_target = torch.arange(logits.shape[-1], device=logits.device)[None] == targets[:, None]
    loss = (log_total - torch.where(is_target, logits, 0.0).sum(dim=-1)).sum()
    return loss, ((logits - log_total[:, None]).exp() - is_target.float()).to(hidden.dtype)


@torch.no_grad()
def measure_loss(clock: Clock, size: BlockSize, compile_it: bool) -> dict[str, float]:
    """Logits per second of the cross-entropy and its gradient, for each mode, without the product that makes the logits."""
    dtype = DTYPES[mixed_type(clock.device)]
    hidden = torch.randn(size.chunk_rows, size.spec.d_model, device=clock.device).to(dtype)
    weight = torch.randn(size.vocab_size, size.spec.d_model, device=clock.device).to(dtype)
    targets = torch.randint(0, size.vocab_size, (size.chunk_rows,), device=clock.device)
    product_s = clock.best_s(lambda: F.linear(hidden, weight), seconds=0.1)
    found: dict[str, float] = {}
    functions: dict[str, Callable[..., object]] = {"eager": chunk_loss}
    if compile_it:
        functions["compiled"] = torch.compile(chunk_loss, dynamic=False)
    for mode, function in functions.items():
        with contextlib.suppress(Exception):  # as above: without a compiler there is no compiled rate
            whole_s = clock.best_s(lambda function=function: function(hidden, weight, targets), seconds=0.2)  # type: ignore[misc]
            left_s = max(whole_s - product_s, LEAST_SHARE * whole_s)
            found[mode] = size.chunk_rows * size.vocab_size / left_s
    return found


NF4_SHAPE = (1024, 1024)


@torch.no_grad()
def measure_nf4(clock: Clock, compile_it: bool) -> dict[str, float]:
    """Weights per second that QLoRA decodes, for each mode: look-ups, which the bandwidth does not bound."""
    matrix = quantize_nf4(torch.randn(*NF4_SHAPE, device=clock.device))
    functions: dict[str, Callable[..., object]] = {"eager": dequantize_nf4}
    if compile_it:
        functions["compiled"] = torch.compile(dequantize_nf4, dynamic=False)
    found: dict[str, float] = {}
    for mode, function in functions.items():
        with contextlib.suppress(Exception):  # as above
            seconds = clock.best_s(lambda function=function: function(matrix, torch.bfloat16), seconds=0.2)  # type: ignore[misc]
            found[mode] = math.prod(NF4_SHAPE) / seconds
    return found


def measure_optimizers(clock: Clock, size: BlockSize, rates: TrainingRates) -> TrainingRates:
    """``rates`` with AdamW's, in bytes/s of the planner's count, and, in elements/s, with Muon's beyond its products and with
    pure bf16's.

    An AdamW update does what training does: gradients become fp32, are measured and clipped, fused AdamW runs, and the working
    copy is written. It takes the matrices of ``OPTIMIZER_BLOCKS`` blocks, because fewer would stay in the cache.
    """
    shapes = [(n, matrix.k) for matrix in block_matrices(size.spec) for _, n in matrix.parts]
    master = [nn.Parameter(torch.randn(*shape, device=clock.device)) for _ in range(OPTIMIZER_BLOCKS) for shape in shapes]
    working = [p.detach().to(torch.bfloat16) for p in master]
    backward = [torch.randn_like(p) for p in working]
    gradients = [torch.zeros_like(p) for p in master]
    for parameter, gradient in zip(master, gradients, strict=True):
        parameter.grad = gradient
    n_elements = sum(p.numel() for p in master)
    adamw = torch.optim.AdamW(master, lr=1e-4, fused=True)

    @torch.no_grad()
    def update() -> None:
        torch._foreach_copy_(gradients, backward)
        torch._foreach_mul_(gradients, 1.0 / float(torch.nn.utils.get_total_norm(gradients)))
        adamw.step()
        torch._foreach_copy_(working, [p.detach() for p in master])

    adamw_rate = optimizer_bytes_moved(n_elements, "bf16") / clock.best_s(update, seconds=0.2)
    element_per_s, matrix_s = _update_rates(functools.partial(_muon_rest_s, clock), shapes)
    rounded_per_s, rounded_matrix_s = _update_rates(functools.partial(_rounded_s, clock), shapes)
    return replace(
        rates,
        adamw_bytes_per_s=adamw_rate,
        muon_element_per_s=element_per_s,
        muon_matrix_s=matrix_s,
        rounded_element_per_s=rounded_per_s,
        rounded_matrix_s=rounded_matrix_s,
    )


FEW_BLOCKS = 4
SMALLER = 0.5
"""The smaller matrices that an update is timed on are so much narrower and shorter."""

Shapes = Sequence[tuple[int, int]]


def _update_rates(seconds: Callable[[Shapes], float], shapes: Shapes) -> tuple[float, float]:
    """(elements per second, seconds of a matrix) of an update that takes ``seconds`` on matrices of given shapes: the line
    through those of ``FEW_BLOCKS`` blocks and smaller ones."""
    smaller = [(int(SMALLER * n), int(SMALLER * k)) for n, k in shapes]
    small_s, large_s = (seconds(which * FEW_BLOCKS) for which in (smaller, list(shapes)))
    n_matrices, n_elements = FEW_BLOCKS * len(shapes), FEW_BLOCKS * sum(n * k for n, k in shapes)
    fixed_s, element_s = straight_line(SMALLER**2 * n_elements, n_elements, small_s, large_s)
    return 1 / element_s, fixed_s / n_matrices


def _rounded_s(clock: Clock, shapes: Shapes) -> float:
    """Seconds of AdamW's update of bf16 matrices of ``shapes``, computed in fp32 and rounded stochastically."""
    weights = [nn.Parameter(torch.randn(*shape, device=clock.device).to(torch.bfloat16)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    worker = torch.optim.AdamW([torch.zeros(1, 1, device=clock.device)], lr=1e-4, fused=True)
    optimizer, noise = torch.optim.AdamW(weights, lr=1e-4, fused=True), Noise(torch.device(clock.device))
    rounded = RoundedUpdates(optimizer, worker, False, noise, {id(weight): str(i) for i, weight in enumerate(weights)})
    return clock.best_s(rounded.step, seconds=0.2)


def _muon_rest_s(clock: Clock, shapes: Shapes) -> float:
    """Seconds of a Muon step on matrices of ``shapes`` without its products, each timed by itself."""
    block = [nn.Parameter(torch.randn(*shape, device=clock.device)) for shape in shapes]
    for parameter in block:
        parameter.grad = torch.zeros_like(parameter)
    muon = muon_class(clock.device)(block, lr=1e-4, adjust_lr_fn="original")
    whole_s = clock.best_s(muon.step, seconds=0.2)
    products_s, dtype = 0.0, DTYPES[mixed_type(clock.device)]
    for (rows, columns), count in Counter(shapes).items():
        for (m, n, k), times in Counter(newton_schulz_products(rows, columns)).items():
            x = torch.randn(m, k, device=clock.device).to(dtype)
            y = torch.randn(k, n, device=clock.device).to(dtype)
            products_s += count * times * clock.best_s(lambda x=x, y=y: x @ y, seconds=0.02, least=3)  # type: ignore[misc]
    return max(whole_s - products_s, LEAST_SHARE * whole_s)
