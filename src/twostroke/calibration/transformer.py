"""Training-shaped pieces: attention forward and backward, one decoder block compiled and eager, the loss, the optimizer.

The planner knows how many bytes a block's norms, rotary turn, sums and activation move; what it cannot know is how fast this
machine's fused kernels move them. So one real block is run, the products and the attention in it are timed by themselves at
the same shapes, and what is left over, divided into those bytes, is the rate. No constant is fitted to a training run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twostroke.calibration.timing import Clock
from twostroke.core.spec import ModelSpec
from twostroke.model.attention import attention_mask
from twostroke.model.decoder import Block
from twostroke.model.rope import rope_tables
from twostroke.planner.params import block_products
from twostroke.planner.training import TrainingShape, elementwise_elements, optimizer_bytes_moved

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BlockSize:
    """The block that is run: a llama block of E = 64·heads on B·T tokens, and the loss over V words."""

    heads: int = 4
    d_ff: int = 704
    batch_size: int = 16
    sequence_length: int = 512
    vocab_size: int = 4096
    chunk_rows: int = 1024

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
            max_positions=self.sequence_length,
            tied_embeddings=True,
        )

    def shape(self, dtype: str, compiled: bool) -> TrainingShape:
        return TrainingShape(self.batch_size, self.sequence_length, dtype=dtype, compile=compiled)


# -- attention ------------------------------------------------------------------------------------------------------------


def attention_pass(clock: Clock, dtype: str, batch: int, heads: int, tokens: int, seconds: float = 0.15) -> tuple[float, float]:
    """(forward, backward) seconds of scaled dot-product attention as packed training calls it: heads of 64, a boolean mask that
    all heads share, operands that are transposed views."""

    def operand() -> Tensor:
        data = torch.randn(batch, tokens, heads, 64, device=clock.device).to(DTYPES[dtype])
        return data.transpose(1, 2).requires_grad_()

    q, k, v = operand(), operand(), operand()
    documents = torch.zeros(batch, tokens, dtype=torch.int32, device=clock.device)
    mask = attention_mask(tokens, None, documents, torch.device(clock.device))
    upstream = torch.randn(batch, tokens, heads, 64, device=clock.device).to(DTYPES[dtype]).transpose(1, 2)

    def backward(result: object) -> None:
        assert isinstance(result, Tensor)
        torch.autograd.grad(result, (q, k, v), upstream)

    return clock.best_of_two_s(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), backward, seconds)


def measure_attention(clock: Clock, lengths: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """Rates by type, direction and length, counted over the whole square: forward 4·B·H·T²·64 FLOP, backward 10·B·H·T²·64."""
    for dtype in DTYPES:
        for tokens in lengths:
            batch = max(1, 2048 // tokens)
            forward_s, backward_s = attention_pass(clock, dtype, batch, 4, tokens)
            square = batch * 4 * tokens * tokens * 64
            yield f"sdpa_{dtype}_forward_t{tokens}_flop_per_s", 4 * square / forward_s
            yield f"sdpa_{dtype}_backward_t{tokens}_flop_per_s", 10 * square / backward_s


# -- one block ------------------------------------------------------------------------------------------------------------


def _products_pass(clock: Clock, size: BlockSize, dtype: str) -> tuple[float, float]:
    """(forward, backward) seconds of the block's four products at its own shapes."""
    rows, forward_s, backward_s = size.batch_size * size.sequence_length, 0.0, 0.0
    for product in block_products(size.spec):
        x = torch.randn(rows, product.k, device=clock.device).to(DTYPES[dtype])
        weight = torch.randn(product.n, product.k, device=clock.device).to(DTYPES[dtype])
        upstream = torch.randn(rows, product.n, device=clock.device).to(DTYPES[dtype])
        forward_s += clock.best_s(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
        backward_s += clock.best_s(lambda u=upstream, weight=weight: u @ weight)  # type: ignore[misc]
        backward_s += clock.best_s(lambda u=upstream, x=x: u.t() @ x)  # type: ignore[misc]
    return forward_s, backward_s


def _block_pass(clock: Clock, block: nn.Module, size: BlockSize, dtype: str, seconds: float) -> tuple[float, float]:
    """(forward, backward) seconds of the block, input gradient and weight gradients included."""
    rows, tokens = size.batch_size, size.sequence_length
    x = torch.randn(rows, tokens, size.spec.d_model, device=clock.device).to(DTYPES[dtype]).requires_grad_()
    upstream = torch.randn(rows, tokens, size.spec.d_model, device=clock.device).to(DTYPES[dtype])
    positions = torch.arange(tokens, device=clock.device)[None].expand(rows, tokens)
    documents = torch.zeros(rows, tokens, dtype=torch.int32, device=clock.device)
    rope = rope_tables(size.spec, positions)
    mask = attention_mask(tokens, None, documents, torch.device(clock.device))

    def backward(result: object) -> None:
        assert isinstance(result, Tensor)
        result.backward(upstream)
        for parameter in (x, *block.parameters()):
            parameter.grad = None

    return clock.best_of_two_s(lambda: block(x, rope, mask), backward, seconds)


def _rates(size: BlockSize, dtype: str, mode: str, rest: tuple[float, float]) -> Iterator[tuple[str, float]]:
    """What is left of forward and backward after products and attention, as bytes/s of the planner's elementwise count."""
    width = 4 if dtype == "fp32" else 2
    tokens = size.batch_size * size.sequence_length
    for direction, left_s in zip(("forward", "backward"), rest, strict=True):
        moved = tokens * width * sum(elementwise_elements(size.spec, direction == "backward").values())
        yield f"block_{dtype}_{mode}_{direction}_bytes_per_s", moved / left_s


def measure_block(clock: Clock, size: BlockSize, compile_it: bool) -> Iterator[tuple[str, float]]:
    """Elementwise rates of an eager and (where a compiler works) a compiled bf16 block, and what compiling took.

    Whatever noise makes the rest come out below a twentieth of the whole is held there: a rate is never infinite.
    """
    torch.manual_seed(0)
    for dtype in DTYPES:
        block = Block(size.spec).to_empty(device=clock.device).to(DTYPES[dtype])
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.normal_(std=0.02)
        products = _products_pass(clock, size, dtype)
        attention = attention_pass(clock, dtype, size.batch_size, size.heads, size.sequence_length)

        def rest(
            whole: tuple[float, float],
            products: tuple[float, float] = products,
            attention: tuple[float, float] = attention,
        ) -> tuple[float, float]:
            forward, backward = (max(w - p - a, w / 20) for w, p, a in zip(whole, products, attention, strict=True))
            return forward, backward

        yield from _rates(size, dtype, "eager", rest(_block_pass(clock, block, size, dtype, 0.3)))
        if compile_it and dtype == "bf16":
            begin = time.perf_counter()
            block.compile(fullgraph=True, dynamic=False)
            try:
                _block_pass(Clock(clock.device, effort=0.0), block, size, dtype, 0.0)
            except Exception:
                # No C++ compiler, or none that works: plans for compiled training fall back on the eager rates.
                continue
            yield "block_compile_s", time.perf_counter() - begin
            yield from _rates(size, dtype, "compiled", rest(_block_pass(clock, block, size, dtype, 0.6)))


# -- loss and optimizer ---------------------------------------------------------------------------------------------------


def chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of some rows and its gradient by their logits, the shape of the work in ``training.loss``."""
    logits = F.linear(hidden, weight).float()
    log_total = logits.logsumexp(dim=-1)
    is_target = torch.arange(logits.shape[-1], device=logits.device)[None] == targets[:, None]
    loss = (log_total - torch.where(is_target, logits, 0.0).sum(dim=-1)).sum()
    return loss, ((logits - log_total[:, None]).exp() - is_target.float()).to(hidden.dtype)


@torch.no_grad()
def measure_loss(clock: Clock, size: BlockSize, compile_it: bool) -> Iterator[tuple[str, float]]:
    """Logits per second of the cross-entropy and its gradient, the product that makes the logits taken off."""
    hidden = torch.randn(size.chunk_rows, size.spec.d_model, device=clock.device).to(torch.bfloat16)
    weight = torch.randn(size.vocab_size, size.spec.d_model, device=clock.device).to(torch.bfloat16)
    targets = torch.randint(0, size.vocab_size, (size.chunk_rows,), device=clock.device)
    product_s = clock.best_s(lambda: F.linear(hidden, weight), seconds=0.1)
    functions: dict[str, Callable[..., object]] = {"eager": chunk_loss}
    if compile_it:
        functions["compiled"] = torch.compile(chunk_loss, dynamic=False, fullgraph=True)
    for mode, function in functions.items():
        with contextlib.suppress(Exception):  # as above: without a compiler there is no compiled rate
            whole_s = clock.best_s(lambda function=function: function(hidden, weight, targets), seconds=0.2)  # type: ignore[misc]
            left_s = max(whole_s - product_s, whole_s / 20)
            yield f"cross_entropy_{mode}_logit_per_s", size.chunk_rows * size.vocab_size / left_s


def measure_optimizer(clock: Clock, size: BlockSize, n_matrices: int = 12) -> Iterator[tuple[str, float]]:
    """Bytes/s of one update as training does it: gradients widened to fp32, clipped by their norm, fused AdamW, working copy
    written; on ``n_matrices`` matrices, over the planner's count of bytes."""
    side = size.spec.d_model * 2
    master = [nn.Parameter(torch.randn(side, side, device=clock.device)) for _ in range(n_matrices)]
    working = [p.detach().to(torch.bfloat16) for p in master]
    gradients = [torch.randn_like(p) for p in working]
    optimizer = torch.optim.AdamW(master, lr=1e-4, fused=True)

    @torch.no_grad()
    def update() -> None:
        for parameter, gradient in zip(master, gradients, strict=True):
            parameter.grad = gradient.float()
        nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        torch._foreach_copy_(working, [p.detach() for p in master])

    moved = optimizer_bytes_moved(n_matrices * side * side, "bf16")
    yield "adamw_bytes_per_s", moved / clock.best_s(update, seconds=0.2)
