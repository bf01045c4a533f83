"""Which kind of master weights a run has."""

from __future__ import annotations

from twostroke.model.decoder import Decoder
from twostroke.training.diloco import LocalMasters
from twostroke.training.precision import COMPUTED_AND_STORED, MasterWeights
from twostroke.training.ranked_masters import DividedMasters, ShardedMasters, SummedMasters
from twostroke.training.ranks import Ranks
from twostroke.training.replicas import ReplicatedMasters
from twostroke.training.weight_differences import DifferenceMasters


def masters_of(decoder: Decoder, dtype: str, ranks: Ranks | None) -> MasterWeights:
    """The masters of a run of ``train.dtype``; ``ranks`` where its recipe has ``[parallel]``."""
    if ranks is None:
        return MasterWeights.of(decoder, dtype)
    computed, stored = COMPUTED_AND_STORED[dtype]
    if ranks.size("shard") > 1:
        sharded = ShardedMasters if ranks.layout.compress_weights == "none" else DifferenceMasters
        return sharded(decoder, computed, stored, ranks)
    if ranks.size("pipeline", "tensor", "expert") > 1:
        return DividedMasters(decoder, computed, stored, ranks)
    if ranks.layout.outer_every:
        return LocalMasters(decoder, computed, stored, ranks)
    # PowerSGD takes all matrices together.
    return (SummedMasters if ranks.layout.compression.low_rank else ReplicatedMasters)(decoder, computed, stored, ranks)
