"""Which layers and parameters a stage of a pipeline has, in one chunk or several, and in which order it computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from twostroke.core.errors import ConfigError
from twostroke.core.policy import layers_of
from twostroke.core.spec import ModelSpec
from twostroke.model.decoder import Decoder
from twostroke.model.experts import ExpertsMlp
from twostroke.training.ranks import Ranks

EMBEDDING = "embed.weight"
"""The parameter that may be the head as well, on another stage."""


def check_pipeline(spec: ModelSpec, n: int, interleave: int = 1) -> None:
    """Raise ConfigError if ``n`` stages of ``interleave`` chunks cannot train ``spec``."""
    if n == 1:
        return
    if spec.n_layers < n * interleave:
        chunks = f"parallel.pipeline={n}" + (f" · interleave={interleave}" if interleave > 1 else "")
        what = "chunk" if interleave > 1 else "stage"
        raise ConfigError(f"{chunks} must not exceed n_layers={spec.n_layers}. Each {what} has a layer at least.")


def own_chunks(ranks: Ranks) -> range:
    """The numbers of the chunks of this rank's stage."""
    return _chunks_of(ranks.at("pipeline"), ranks)


def own_layers(decoder: Decoder, ranks: Ranks) -> list[range]:
    """The layers of each chunk of this rank's stage."""
    return layers_of_stage(ranks.at("pipeline"), decoder.spec.n_layers, ranks)


def layers_of_stage(stage: int, n_layers: int, ranks: Ranks) -> list[range]:
    """The layers of each chunk of ``stage``, of ``n_layers`` in all."""
    n_chunks = ranks.size("pipeline") * ranks.layout.interleave
    return [layers_of(chunk, n_chunks, n_layers) for chunk in _chunks_of(stage, ranks)]


def _chunks_of(stage: int, ranks: Ranks) -> range:
    """Chunk c is on stage c modulo their number."""
    n_stages = ranks.size("pipeline")
    return range(stage, n_stages * ranks.layout.interleave, n_stages)


def chunk_with(name: str, decoder: Decoder, ranks: Ranks) -> int:
    """The chunk that parameter or buffer ``name`` belongs to."""
    n_chunks = ranks.size("pipeline") * ranks.layout.interleave
    part, _, rest = name.partition(".")
    if part == "blocks":
        layer = int(rest.split(".", 1)[0])
        return next(c for c in range(n_chunks) if layer in layers_of(c, n_chunks, decoder.spec.n_layers))
    return 0 if part in ("embed", "position_embed") else n_chunks - 1


def stage_of(name: str, decoder: Decoder, ranks: Ranks) -> int:
    """The stage that holds parameter or buffer ``name``."""
    return chunk_with(name, decoder, ranks) % ranks.size("pipeline")


def keep_stage(decoder: Decoder, ranks: Ranks) -> None:
    """Empty what other stages hold of ``decoder``, but for an embedding that is the last stage's head: that is a copy; and but
    for what routers count, a few numbers an expert, which are summed over all ranks and move the biases of all alike."""
    own, last = ranks.at("pipeline"), ranks.size("pipeline") - 1
    counted = {id(held) for m in decoder.modules() if isinstance(m, ExpertsMlp) for held in m.buffers(recurse=False)}
    for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers()):
        if stage_of(name, decoder, ranks) != own and id(tensor) not in counted:
            tensor.requires_grad_(False)
            if name != EMBEDDING or decoder.head is not None or own != last:
                tensor.data = tensor.data.new_empty(0)


class Turn(NamedTuple):
    """A pass of a stage: forward or backward, through the stage's ``number``-th chunk, of a micro-batch."""

    is_forward: bool
    number: int
    micro_batch: int


def turns(stage: int, n_stages: int, interleave: int, n_micro_batches: int) -> Iterator[Turn]:
    """What ``stage`` computes in a step, in order: one forward and one backward pass in turn (1F1B), after as many forward
    passes as it takes for the first gradient to come.

    Stage s of P computes P − 1 − s micro-batches ahead of their backward passes, so it keeps the activations of P − s at most
    (Narayanan et al. 2019, PipeDream). With more than one chunk P micro-batches, which P then must divide, pass a chunk before
    the stage goes on to its next one, and 2·(P − 1 − s) + (V − 1)·P passes are ahead (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2). Backward passes of each chunk come in the order of the micro-batches' numbers, so gradients are added as one
    process adds them, and to the same bits.
    """
    n = n_micro_batches * interleave
    after = n_stages - 1 - stage
    ahead = min(n, after if interleave == 1 else 2 * after + (interleave - 1) * n_stages)
    for i in range(n + ahead):
        for is_forward, pass_number in ((True, i), (False, i - ahead)):
            if 0 <= pass_number < n:
                group, place = divmod(pass_number, n_stages * interleave)
                number, micro_batch = divmod(place, n_stages)
                yield Turn(is_forward, number if is_forward else interleave - 1 - number, group * n_stages + micro_batch)


def most_sending(n_stages: int, interleave: int) -> int:
    """Messages that a stage holds until others have taken them: more than it can be ahead of them, so that none waits for
    another in a circle."""
    return 8 + 4 * n_stages * interleave
