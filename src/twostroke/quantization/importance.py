"""How much each input of a model's matrices matters: its mean square over a text (llama.cpp's importance matrix)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twostroke.model.experts import ExpertMatrix

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from twostroke.model.decoder import Decoder


@torch.inference_mode()
def mean_squares(
    decoder: Decoder, batches: Sequence[Int[Tensor, "B T"]], progress: Callable[[float, str], None] | None = None
) -> dict[str, Float[Tensor, " k"]]:
    """By canonical name of each block's matrices and of the head, the mean of x² of each column over the tokens of ``batches``.

    An error e of a weight in column j adds e²·mean(x_j²) to the mean squared error of an output, other errors being
    independent. Experts share one mean over the tokens that any of them sees. Memory beside the model: a forward pass of one
    batch.
    """
    sums: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    def add(name: str, x: Tensor) -> None:
        flat = x.flatten(0, -2).float()
        total = flat.square().sum(dim=0, dtype=torch.float64)
        sums[name] = sums[name] + total if name in sums else total
        rows[name] = rows.get(name, 0) + len(flat)

    def seen(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        add(name, inputs[0])

    handles = [
        module.register_forward_pre_hook(partial(seen, f"blocks.{i}.{name}.weight"))
        for i, block in enumerate(decoder.blocks)
        for name, module in block.named_modules()
        if isinstance(module, (nn.Linear, ExpertMatrix))
    ]
    try:
        for i, batch in enumerate(batches):
            if progress is not None:
                progress(i / len(batches), f"inputs of matrices: batch {i + 1} of {len(batches)}")
            add("head.weight", decoder.hidden(batch))
    finally:
        for handle in handles:
            handle.remove()
    found = {name: (total / rows[name]).float() for name, total in sums.items()}
    if decoder.spec.tied_embeddings:
        found["embed.weight"] = found.pop("head.weight")
    return found
