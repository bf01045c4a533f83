"""Lets ranks that hold parts of a decoder run it on any text: scores and samples in the middle of a run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from twostroke.model.decoder import Decoder
from twostroke.training.ranks import Ranks
from twostroke.training.stages import own_layers
from twostroke.training.tensor_parallel import gathered_logits

PASSED_ON = 5
"""The tag of residual streams that stages send each other outside of a step (those of steps: ``pipelined_step``)."""


def run_together(decoder: Decoder, ranks: Ranks, dtype: torch.dtype) -> None:
    """Let ``decoder.hidden`` take sequences of any length, and ``decoder.logits`` give whole rows, if the ranks of a replica
    call both alike. Of stages the last one alone has them (``Ranks.of_last_layer``), and the others' have no meaning."""
    layout = ranks.layout
    if layout.tensor * layout.pipeline == 1:
        return
    whole: Any = decoder.hidden

    def hidden(tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        n_tokens = tokens.shape[1]
        if positions is None:
            positions = torch.arange(n_tokens, device=tokens.device)[None]
        filling = -n_tokens % layout.tensor  # behind the text, where causal attention never looks
        if filling:
            tokens, positions = F.pad(tokens, (0, filling)), F.pad(positions, (0, filling))
            documents = None if documents is None else F.pad(documents, (0, filling), value=int(documents.max()))
        if layout.pipeline == 1:
            found: Tensor = whole(tokens, positions, documents)
        else:
            found = _through_stages(decoder, ranks, dtype, tokens, positions, documents)
        return found[:, :n_tokens]

    def logits(rows: Tensor) -> Tensor:
        if ranks.at("pipeline") < layout.pipeline - 1:
            return rows.new_zeros(*rows.shape[:-1], decoder.spec.vocab_size)
        found = Decoder.logits(decoder, rows)
        return found if layout.tensor == 1 else gathered_logits(found, decoder.spec, ranks)

    outside: Any = decoder
    outside.hidden, outside.logits = hidden, logits


def _through_stages(
    decoder: Decoder, ranks: Ranks, dtype: torch.dtype, tokens: Tensor, positions: Tensor, documents: Tensor | None
) -> Tensor:
    """What the last stage reads out; zeros on others."""
    n_stages, stage = ranks.size("pipeline"), ranks.at("pipeline")
    made = tokens
    for layers in own_layers(decoder, ranks):
        if layers.start > 0:
            shape = (len(tokens), tokens.shape[1] // ranks.size("tensor"), decoder.spec.d_model)
            made = torch.empty(shape, dtype=dtype, device=tokens.device)
            dist.recv(made, ranks.neighbour("pipeline", (stage - 1) % n_stages), tag=PASSED_ON)
        made = decoder.stage(made, positions, documents, layers)
        if layers.stop < decoder.spec.n_layers:
            dist.send(made.contiguous(), ranks.neighbour("pipeline", (stage + 1) % n_stages), tag=PASSED_ON)
    return made if stage == n_stages - 1 else made.new_zeros(*tokens.shape, decoder.spec.d_model)
