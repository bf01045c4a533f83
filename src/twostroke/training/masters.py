"""Which kind of master weights a run has."""

from __future__ import annotations

from twostroke.model.decoder import Decoder
from twostroke.training.cut_masters import ExpertMasters, TensorMasters
from twostroke.training.diloco import LocalMasters
from twostroke.training.pipeline_masters import PipelineMasters
from twostroke.training.precision import COMPUTED_AND_STORED, MasterWeights
from twostroke.training.ranked_masters import ShardedMasters, SummedMasters
from twostroke.training.ranks import Ranks


def masters_of(decoder: Decoder, dtype: str, ranks: Ranks | None) -> MasterWeights:
    """The masters of a run of ``train.dtype``; ``ranks`` where its recipe has ``[parallel]``."""
    if ranks is None:
        return MasterWeights.of(decoder, dtype)
    computed, stored = COMPUTED_AND_STORED[dtype]
    layout = ranks.layout
    if layout.shard > 1:
        return ShardedMasters(decoder, computed, ranks)
    kinds: list[tuple[bool, type[PipelineMasters | TensorMasters | ExpertMasters | LocalMasters]]] = [
        (layout.pipeline > 1, PipelineMasters),
        (layout.tensor > 1, TensorMasters),
        (layout.expert > 1, ExpertMasters),
        (layout.outer_every > 0, LocalMasters),
    ]
    kind = next((kind for asked, kind in kinds if asked), SummedMasters)
    return kind(decoder, computed, stored, ranks)
