"""How a model is cut over devices: data, tensor, pipeline and expert parallel, and which of a job's groups share a node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

from twostroke.core.checks import check_whole
from twostroke.core.errors import ConfigError
from twostroke.core.parallel_recipe import ParallelRecipe, dividing, divisors, one_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware, Link

ZERO_STAGES = (0, 1, 2, 3)

MOST_RANKS = 2**20
"""Of one kind of parallelism: forty times the largest cluster that a published run used."""


@dataclass(frozen=True)
class Layout:
    """How many ways a job is cut.

    Ranks are numbered tensor first, then data, then pipeline, as Megatron-LM does, so tensor groups are nearest.
    Raises ConfigError for counts below 1 and for combinations that mean nothing.
    """

    data: Annotated[int, "replicas"] = 1
    zero: Annotated[
        int, "what replicas share out: 0 nothing (DDP), 1 optimizer state and masters, 2 gradients too, 3 weights too (FSDP2)"
    ] = 0
    tensor: Annotated[int, "ranks of tensor parallelism"] = 1
    sequence_parallel: Annotated[bool, "what tensor parallel leaves whole (norms, residuals) is cut along the sequence"] = True
    pipeline: Annotated[int, "stages"] = 1
    interleave: Annotated[int, "chunks of layers that a stage holds"] = 1
    expert: Annotated[int, "devices of the data·tensor plane that share each layer's experts"] = 1
    devices_per_node: Annotated[int | None, "devices of a node; null: as the hardware says"] = None
    context: Annotated[int, "devices that share each sequence (ring attention)"] = 1
    copies: Annotated[int, "of what `zero` shares out: groups of data-parallel ranks that hold a whole each (HSDP)"] = 1
    sharing: Annotated[int, "ranks that share one device, each with a part of its cores and memory; 1: each has its own"] = 1

    def __post_init__(self) -> None:
        counts = ("data", "tensor", "pipeline", "interleave", "expert", "context", "copies", "sharing")
        for name in counts if self.devices_per_node is None else (*counts, "devices_per_node"):
            check_whole(name, getattr(self, name), most=MOST_RANKS)
        if isinstance(self.zero, bool) or self.zero not in ZERO_STAGES:
            raise ConfigError(f"zero={self.zero!r} must be 0 (DDP), 1, 2 or 3 (FSDP2).")
        if self.zero and self.replicas == 1:
            raise ConfigError(
                f"zero={self.zero} shards over data-parallel ranks, and data=1 has none. Raise data or use zero=0."
            )
        if self.interleave > 1 and self.pipeline == 1:
            raise ConfigError(
                f"interleave={self.interleave} cuts pipeline stages into chunks, and pipeline=1. Use interleave=1."
            )
        if self.copies > 1 and (self.zero < 2 or self.replicas == self.copies or self.data % self.copies):
            raise ConfigError(
                f"copies={self.copies} of shards need zero=2 or 3 and must divide data={self.data}, with ranks left to share "
                "each."
            )
        plane = self.replicas * self.tensor
        if plane % self.expert:
            raise ConfigError(f"expert={self.expert} must divide data·tensor={plane}. Use {divisors(plane)}.")
        if self.expert % self.tensor and self.tensor % self.expert:
            raise ConfigError(f"expert={self.expert} must divide tensor={self.tensor} or be a multiple of it.")
        if self.expert_data % self.copies:
            raise ConfigError(f"copies={self.copies} must divide the {self.expert_data} devices that hold the same experts.")

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters before ZeRO divides them: those of a sequence hold what replicas hold."""
        return self.data * self.context

    @property
    def n_devices(
        self,
    ) -> Annotated[int, "data · context · tensor · pipeline; ranks, if they share devices"]:
        return self.replicas * self.tensor * self.pipeline

    @property
    def n_whole(self) -> int:
        """Devices that exist: as many as ``n_devices``, or one for each ``sharing`` of them."""
        return -(-self.n_devices // self.sharing)

    @property
    def n_paid(self) -> float:
        """Devices that are paid for: ``n_whole``, or the part of one of a job that shares it with others, as the runs of a
        sweep do."""
        return self.n_devices / self.sharing if self.n_devices < self.sharing else self.n_whole

    def is_trained(self, spec: ModelSpec) -> bool:
        """Whether our trainer runs ``spec`` by it: replicas, ZeRO-2 or 3 over them, and tensor, context, expert and pipeline
        parallel in them, but no expert is cut."""
        cuts_experts = spec.moe is not None and self.expert % self.tensor > 0
        return self.zero != 1 and not cuts_experts

    @property
    def sequence_cut(self) -> int:
        """How many ways norms and residuals are cut: ``tensor`` under sequence parallel, else 1."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def expert_cut(self) -> int:
        """How many ways the experts' weights are cut: by ``expert``, and by tensor parallel inside an expert beyond that."""
        return max(self.expert, self.tensor)

    @property
    def expert_data(self) -> int:
        """Devices of the data·tensor plane that hold the same part of the same experts."""
        return self.replicas * self.tensor // self.expert_cut

    def shared_by(self, zero: int) -> tuple[int, int]:
        """How many ranks share what ZeRO divides from stage ``zero`` on: everything but experts, and experts."""
        return (self.replicas // self.copies, self.expert_data // self.copies) if self.zero >= zero else (1, 1)

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError, naming what may be used, if ``spec`` cannot be cut so.

        ``tensor`` must divide the query heads and the MLP's width, and divide the key-value heads or be a multiple of them
        (each is then held by several devices). pipeline·interleave chunks may be uneven (``sharding.stages``), but of L layers,
        embedding and head each chunk holds something.
        """
        _check(self, spec)


SINGLE = Layout()
"""One device."""


def replicas_of(parallel: ParallelRecipe | None) -> int:
    """``Layout.data`` of a recipe's ``[parallel]``; one replica where it leaves ``data`` open."""
    return 1 if parallel is None else max(1, parallel.data) * parallel.shard * parallel.expert


def layout_of(parallel: ParallelRecipe | None, spec: ModelSpec, sharing: int = 1) -> Layout:
    """The layout of a recipe's ``[parallel]``, where ranks that share each matrix of ``spec`` have experts of their own.
    ``sharing`` ranks have one device."""
    if parallel is None:
        return SINGLE
    return Layout(
        data=replicas_of(parallel),
        zero=parallel.zero if parallel.shard > 1 else 0,
        tensor=parallel.tensor,
        context=parallel.context,
        expert=parallel.expert * (1 if spec.moe is None else parallel.tensor),
        pipeline=parallel.pipeline,
        interleave=parallel.interleave,
        copies=max(1, parallel.data) if parallel.shard > 1 else 1,
        sharing=sharing,
    )


@lru_cache(maxsize=4096)
def _check(layout: Layout, spec: ModelSpec) -> None:
    if not_divided := _not_divided(spec, layout.tensor, layout.expert):
        choices = [n for n in dividing(spec.n_heads) if not _not_divided(spec, n, layout.expert)]
        raise ConfigError(f"tensor={layout.tensor} must divide {not_divided[0]}. Use {one_of(choices)}.")
    chunks = layout.pipeline * layout.interleave
    if chunks > spec.n_layers + 2:
        words = f"pipeline={layout.pipeline}" + (f" · interleave={layout.interleave}" if layout.interleave > 1 else "")
        raise ConfigError(
            f"{words} makes more chunks than n_layers={spec.n_layers}, embedding and head. Use at most {spec.n_layers + 2}."
        )
    if layout.expert > 1:
        if spec.moe is None:
            raise ConfigError(f"expert={layout.expert} needs a mixture of experts, and this model is dense. Use expert=1.")
        if spec.moe.n_experts % layout.expert:
            raise ConfigError(
                f"expert={layout.expert} must divide n_experts={spec.moe.n_experts}. Use {divisors(spec.moe.n_experts)}."
            )


def _not_divided(spec: ModelSpec, tensor: int, expert: int) -> list[str]:
    """What ``tensor`` ranks cannot divide: heads, the MLP's width in dense layers, that of shared experts, and an expert's own,
    which is cut only as far as ``expert`` leaves devices for it."""
    found = []
    if spec.n_heads % tensor:
        found.append(f"n_heads={spec.n_heads}")
    elif spec.mla is None and spec.n_kv_heads % tensor and tensor % spec.n_kv_heads:
        found.append(f"n_kv_heads={spec.n_kv_heads} or be a multiple")
    if (spec.moe is None or (spec.moe.layers is not None and len(spec.moe.layers) < spec.n_layers)) and spec.d_ff % tensor:
        found.append(f"d_ff={spec.d_ff}")
    if spec.moe is not None:
        if spec.moe.d_expert % max(1, tensor // expert):
            found.append(f"moe.d_expert={spec.moe.d_expert}")
        if spec.moe.shared_width % tensor:
            found.append(f"the shared experts' width={spec.moe.shared_width}")
    return found


def group_link(layout: Layout, hardware: Hardware, size: int, stride: int = 1) -> Link:
    """The link that bounds a collective of ``size`` ranks that are ``stride`` apart. Ranks that share a device are in one node.

    Inside a node it is the device's own link. Beyond a node, each of the g = node/stride members that a node holds drives its
    own network port in a ring of its own, as NCCL's rings do: the rate is min(link, g·network), and α is the network's.
    """
    node = layout.devices_per_node or max(hardware.devices_per_node, layout.sharing)
    if size * stride <= node:
        return hardware.link
    members = max(1, min(size, node // stride))
    rate = min(hardware.link.bytes_per_s, members * hardware.network.bytes_per_s) if members > 1 else None
    return hardware.network if rate is None else replace(hardware.network, bytes_per_s=rate)
