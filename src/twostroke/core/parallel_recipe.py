"""``ParallelRecipe``: how a run is cut over ranks. The ``[parallel]`` section of a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from twostroke.core.compressions import COMPRESSIONS, Compression
from twostroke.core.errors import ConfigError

CUTS = ("shard", "expert", "pipeline", "context", "tensor")
"""How the ranks of a replica share its work."""

MAX_LOCAL_RANKS = 1024
"""Processes that are started on one machine. Without a limit a wrong number ended in what the system refused first, or after
minutes of measuring."""


@dataclass(frozen=True)
class ParallelRecipe:
    """``data`` replicas of ``shard`` ranks each; ``data`` = 0 takes as many replicas as the ranks that are started make.

    ``zero`` says what the ``shard`` ranks of a replica share out: 2 masters, gradients and optimizer state, 3 the weights too,
    which are then gathered again for each backward pass. ``expert`` ranks of a replica, and those of ``tensor`` with them,
    share each layer's experts, ``tensor`` ranks each other matrix, ``context`` ranks each sequence, and each of ``pipeline``
    ranks has a run of the layers; the latter three compute each micro-batch together. Each stage has ``interleave`` runs of the
    layers, which take turns. A step's ``train.grad_accumulation`` micro-batches of ``train.batch_size`` rows are shared out
    over all other ranks, so the recipe describes the same step for any number of ranks; a micro-batch is one pass. With
    ``exact`` all sums are added in one order whatever the layout; sums inside a product that ranks share are not, and come
    close. ``threads`` are those of a rank on a CPU, on which the order of sums inside a product depends; 0 is the cores over
    the ranks of the machine.

    ``compress`` is how gradients are sent (``core.compressions``), ``compress_rank`` that of PowerSGD's factors, and
    ``error_feedback`` keeps what int8, int4 and PowerSGD left out for the next step. ``compress_weights`` is how the ranks of
    ``shard`` send what an update changed of the weights that all of them hold (SDP4Bit, ``training.weight_differences``). With
    ``outer_every`` = H replicas train by themselves and exchange what H steps changed (DiLoCo, ``training.diloco``), in
    ``fragments`` that take turns; what is exchanged comes in ``outer_overlap`` steps later, in which training goes on, and a
    replica then keeps ``outer_mixing`` of its own weights. All three change the result with the number of ranks, so they need
    ``exact`` = False.

    ``pace_mbit`` is the most that a rank on a CPU sends a second, in millions of bits, 0 without a limit: below the link's rate
    it makes bursts flatter, which others on the link feel, and changes no bit.

    ``layout`` = "auto" leaves ``data``, ``zero``, ``interleave`` and all cuts to the planner (``planner.choosing.layouts``), by
    the ranks that are started.
    """

    layout: Literal["explicit", "auto"] = "explicit"
    data: int = 0
    shard: int = 1
    zero: int = 3
    exact: bool = True
    threads: int = 0
    compress: str = "none"
    compress_rank: int = 4
    error_feedback: bool = True
    compress_weights: str = "none"
    outer_every: int = 0
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    outer_overlap: int = 0
    outer_mixing: float = 0.5
    pace_mbit: float = 0.0
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for name, least in (("data", 0), ("threads", 0), *((cut, 1) for cut in CUTS)):
            if getattr(self, name) < least:
                raise ConfigError(f"parallel.{name}={getattr(self, name)} must be at least {least}.")
        if self.zero not in (2, 3):
            raise ConfigError(
                f"parallel.zero={self.zero} must be 2 (masters, gradients and optimizer state are sharded) or 3 (weights too). "
                "Use parallel.shard=1 to shard nothing."
            )
        given = [name for name in ("data", "zero", "interleave", *CUTS) if getattr(self, name) != getattr(ParallelRecipe, name)]
        if self.is_auto and given:
            raise ConfigError(
                f'parallel.layout="auto" leaves parallel.{given[0]} to the planner, and it is {getattr(self, given[0])}. Leave '
                "one of the two out."
            )
        if self.interleave < 1 or (self.interleave > 1 and self.pipeline == 1):
            raise ConfigError(
                f"parallel.interleave={self.interleave} must be at least 1, the chunks of layers that each stage has, and 1 "
                "without parallel.pipeline."
            )
        self._check_compress()
        if self.compress_weights != "none":
            self._check_compress_weights()
        self._check_outer()
        self._check_pace()

    def _check_compress(self) -> None:
        if self.compress not in COMPRESSIONS:
            raise ConfigError(
                f"parallel.compress={self.compress!r:.50} is not a way to send gradients. Use one of {', '.join(COMPRESSIONS)}."
            )
        if not 1 <= self.compress_rank <= 1024:
            raise ConfigError(f"parallel.compress_rank={self.compress_rank} must be from 1 to 1024.")
        if self.compress == "none":
            return
        if self.exact:
            raise ConfigError(
                f'parallel.compress="{self.compress}" rounds what ranks send, and exact=true promises the same bits for any '
                "number of them. Set parallel.exact=false, or leave compress out."
            )
        if self.of_a_replica > self.shard:
            raise ConfigError(
                f'parallel.compress="{self.compress}" and parallel.{self._shared} are not trained together yet. Use '
                "parallel.data alone, or parallel.shard."
            )
        if self.shard > 1 and self.compression.low_rank:
            raise ConfigError(
                f'parallel.compress="{self.compress}" needs whole matrices, and shard={self.shard} cuts them. Use "int8" or '
                '"int4", or parallel.shard=1.'
            )

    def _check_compress_weights(self) -> None:
        codes = [name for name, way in COMPRESSIONS.items() if way.is_code]
        if self.compress_weights not in codes:
            raise ConfigError(
                f"parallel.compress_weights={self.compress_weights!r:.50} is not a way to send what an update changed. Use one "
                f"of none, {', '.join(codes)}."
            )
        asked = f'parallel.compress_weights="{self.compress_weights}"'
        if self.is_auto:
            raise ConfigError(
                f'{asked} needs shard above 1 and zero=2, which parallel.layout="auto" leaves to the planner. Give both, and '
                "leave layout out."
            )
        if self.exact:
            raise ConfigError(
                f"{asked} rounds what ranks compute with, and exact=true promises the same bits for any number of them. Set "
                "parallel.exact=false, or leave compress_weights out."
            )
        if self.shard == 1:
            raise ConfigError(
                f"{asked} sends weights to ranks that do not update them, and with shard=1 each rank updates all of them. Use "
                "parallel.shard above 1, or leave compress_weights out."
            )
        if self.zero == 3:
            raise ConfigError(
                f"{asked} sends the difference to whole weights that each rank holds, and zero=3 drops these after each pass. "
                "Use parallel.zero=2."
            )
        if self.of_a_replica > self.shard:
            raise ConfigError(
                f"{asked} and parallel.{self._shared} are not trained together yet. Use parallel.shard, with or without "
                "parallel.data."
            )

    def _check_outer(self) -> None:
        if self.outer_every < 0:
            raise ConfigError(f"parallel.outer_every={self.outer_every} must be at least 0, which exchanges gradients.")
        if self.fragments < 1 or self.fragments > max(1, self.outer_every):
            raise ConfigError(
                f"parallel.fragments={self.fragments} must be from 1 to outer_every={self.outer_every}: at most one is "
                "exchanged a step."
            )
        if not 0 < self.outer_learning_rate < float("inf"):
            raise ConfigError(f"parallel.outer_learning_rate={self.outer_learning_rate} must be above 0 and finite.")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"parallel.outer_momentum={self.outer_momentum} must be at least 0 and less than 1.")
        if not 0 <= self.outer_overlap < max(1, self.outer_every):
            raise ConfigError(
                f"parallel.outer_overlap={self.outer_overlap} must be at least 0 and less than outer_every={self.outer_every}: "
                "a fragment's exchange ends before its next one begins."
            )
        if not 0 <= self.outer_mixing < 1:
            raise ConfigError(f"parallel.outer_mixing={self.outer_mixing} must be at least 0 and less than 1.")
        if not self.outer_every:
            return
        if self.exact:
            raise ConfigError(
                f"parallel.outer_every={self.outer_every} lets replicas train apart, and exact=true promises the same bits for "
                "any number of them. Set parallel.exact=false, or leave outer_every out."
            )
        if self.of_a_replica > 1:
            raise ConfigError(
                f"parallel.outer_every={self.outer_every} keeps a whole model on each rank, and parallel.{self._shared} cuts "
                "it. Use parallel.data alone."
            )

    def _check_pace(self) -> None:
        if not 0 <= self.pace_mbit < float("inf"):
            raise ConfigError(f"parallel.pace_mbit={self.pace_mbit} must be at least 0, which sets no limit, and finite.")
        if self.pace_mbit and (self.is_auto or self.of_a_replica > self.shard):
            cut = 'layout="auto" may choose' if self.is_auto else f"{self._shared} has"
            raise ConfigError(
                f"parallel.pace_mbit={self.pace_mbit:g} slows what ranks send, and parallel.{cut} cuts whose traffic is waited "
                "for at once. Use it with parallel.data and parallel.shard, whose traffic goes on beside computing."
            )

    @property
    def is_auto(self) -> bool:
        """Whether the planner lays out."""
        return self.layout == "auto"

    @property
    def compression(self) -> Compression:
        return COMPRESSIONS[self.compress]

    @property
    def feeds_back(self) -> bool:
        """Whether ranks keep what compression left out."""
        return self.compression.feeds_back and self.error_feedback and self.shard == 1

    @property
    def ranks(self) -> int:
        """Ranks that the section asks for; 0 where any number will do."""
        return self.data * self.of_a_replica

    @property
    def of_a_replica(self) -> int:
        """Ranks of one replica."""
        return self.shard * self.expert * self.pipeline * self.context * self.tensor

    @property
    def together(self) -> int:
        """Ranks that compute each micro-batch together."""
        return self.pipeline * self.context * self.tensor

    def on(self, n_ranks: int, micro_batches: int) -> ParallelRecipe:
        """The layout on ``n_ranks`` ranks, with its ``data`` filled in. Raises ConfigError if it does not divide them, or if
        they do not divide the ``micro_batches`` of a step. One that the planner chooses stays as it is."""
        if self.is_auto:
            return self
        for name in CUTS:
            if n_ranks % getattr(self, name):
                raise ConfigError(
                    f"parallel.{name}={getattr(self, name)} must divide the {n_ranks} ranks. Use {divisors(n_ranks)}."
                )
        if n_ranks % self.of_a_replica:
            raise ConfigError(
                f"parallel.{self._shared} are {self.of_a_replica} ranks of a replica, which must divide the {n_ranks} ranks. "
                f"Start a multiple of {self.of_a_replica}."
            )
        if self.ranks not in (0, n_ranks):
            raise ConfigError(
                f"parallel.data={self.data} · parallel.{self._shared} are {self.ranks} ranks, and {n_ranks} were started. "
                f"Use --ranks {self.ranks}, or leave parallel.data out."
            )
        n_readers = n_ranks // self.together
        if micro_batches % n_readers:
            what = "ranks" if n_readers == n_ranks else f"groups of parallel.{self._named(CUTS[2:])} ranks"
            raise ConfigError(
                f"{n_readers} {what} must divide train.grad_accumulation={micro_batches}, the micro-batches of a step. Use "
                f"{divisors(micro_batches)} {what}, or lower train.batch_size and raise train.grad_accumulation."
            )
        if self.interleave > 1 and micro_batches // n_readers % self.pipeline:
            raise ConfigError(
                f"parallel.pipeline={self.pipeline} must divide the {micro_batches // n_readers} micro-batches of a pipeline's "
                f"step where parallel.interleave={self.interleave} is above 1. Change train.grad_accumulation={micro_batches}."
            )
        if self.compress != "none" and self.shard > 1 and n_ranks > self.shard:
            raise ConfigError(
                f'parallel.compress="{self.compress}" is for replicas of one rank or for one replica, and {n_ranks} ranks with '
                f"shard={self.shard} are {n_ranks // self.shard} replicas. Use shard=1 or shard={n_ranks}."
            )
        return replace(self, data=n_ranks // self.of_a_replica)

    @property
    def _shared(self) -> str:
        return self._named(CUTS)

    def _named(self, cuts: tuple[str, ...]) -> str:
        """ "shard=2 · pipeline=4": those of ``cuts`` that are above 1."""
        return " · ".join(f"{name}={getattr(self, name)}" for name in cuts if getattr(self, name) > 1) or f"{cuts[0]}=1"


def one_of(values: Iterable[int]) -> str:
    """ "1, 2 or 4": the choices ``values``, of which there is at least one."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def dividing(number: int) -> list[int]:
    """What divides ``number``, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def divisors(number: int) -> str:
    """ "1, 2 or 4": what divides ``number``."""
    return one_of(dividing(number))


def check_pieces(sequence_length: int, context: int) -> None:
    """Raise ConfigError if ``context`` ranks cannot share a sequence: each takes a piece of its first half and one of its
    last."""
    pieces = 2 * context
    if context > 1 and sequence_length % pieces:
        fitting = divisors(sequence_length // 2) if sequence_length > 1 and sequence_length % 2 == 0 else "1"
        raise ConfigError(
            f"context={context} cuts sequences into {pieces} pieces, which sequence_length={sequence_length} is no multiple "
            f"of. Use {fitting}, or {max(1, sequence_length // pieces) * pieces} tokens."
        )
