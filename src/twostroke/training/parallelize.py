"""Lays a decoder out: threads, compilation of each block, and its parameters over ranks. The model's own files do not depend on
it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.model.adapters import LowRankExperts, Nf4Experts, Nf4Linear
from twostroke.model.decoder import Decoder
from twostroke.model.experts import ExpertMatrix
from twostroke.training.compression import decoded, encoded
from twostroke.training.context_parallel import check_context
from twostroke.training.exchanges import SENT, Exchange, Sending, UnderWay, gather_into, reduce_scatter, wait_for
from twostroke.training.expert_parallel import check_expert, expert_axes, share_experts
from twostroke.training.holding import Holding
from twostroke.training.loss import ChunkFunction, chunk_loss
from twostroke.training.ranks import Ranks
from twostroke.training.stages import check_pipeline, keep_stage, own_layers, stage_of
from twostroke.training.tensor_parallel import check_tensor, chunk_of_cut, cut_decoder
from twostroke.training.tree_sums import tree_sum
from twostroke.training.whole import Cut

Log = Callable[[str], None]


def pick_device() -> torch.device:
    """The first GPU that torch sees, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_available_cores(asked: int = 0, processes: int = 1) -> int:
    """Let torch use this process's share of the cores, of ``processes`` that run beside each other, unless ``OMP_NUM_THREADS``
    is set; or as many threads as are ``asked`` for. Returns the number of threads."""
    if asked or not os.environ.get("OMP_NUM_THREADS"):
        threads = asked or max(1, available_cores() // processes)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    return torch.get_num_threads()


class OrderedReduceScatter:
    """FSDP2's reduce-scatter as an exchange of pieces that each rank adds up in one order; the sum, not the mean.

    It sends as much as a ring does, and half of what gloo's own reduce-scatter sends, which takes twice as long and leaves six
    times the message in its threads' heaps: on a CPU it is never asked. Pieces travel in fp32, with ``exact`` in ``wire``, the
    type that the backward pass computed them in, or as codes of ``parallel.compress``, and are added in fp32. Codes feed
    nothing back: that would take a whole gradient of memory on each rank, which sharding saves.

    On a CPU, where FSDP2 has no streams, what it returns is not there yet: the exchange goes on beside the backward pass of the
    next unit. The gradients must not be read before ``under_way`` has finished.
    """

    def __init__(self, wire: torch.dtype, ranks: Ranks, under_way: UnderWay) -> None:
        self._wire, self._exact, self._way = wire, ranks.layout.exact, ranks.layout.compression
        self._under_way = under_way

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if input_tensor.device.type == "cpu":
            self._under_way.begin(self._reducing(output_tensor, input_tensor, group))
        else:
            wait_for(self._reducing(output_tensor, input_tensor, group))  # FSDP2 has a stream for it
        return None

    def _reducing(self, output: Tensor, message: Tensor, group: Any) -> Exchange:
        n = dist.get_world_size(group)
        if self._way.name != "none":
            pieces = message.float().view(n, -1)
            n_own = pieces.shape[1]
            codes = encoded(nn.functional.pad(pieces, (0, -n_own % self._way.multiple)), self._way)
            sending = Sending(codes, group, "data")
            yield sending.work
            received = decoded(torch.stack(sending.pieces()), self._way)
            output.copy_(tree_sum(list(received[:, :n_own].contiguous())))
        elif self._exact or message.device.type == "cpu":
            sending = Sending(message.to(self._wire if self._exact else message.dtype), group, "data")
            yield sending.work
            came = sending.pieces()
            del sending  # with what was sent
            output.copy_(tree_sum(came))
        else:
            SENT["data"] += (n - 1) * message.numel() * message.element_size() // n
            yield reduce_scatter(output, message, dist.ReduceOp.SUM, group=group, async_op=True)


class CountedAllGather:
    """FSDP2's all-gather of weights, whose bytes are counted."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        work = gather_into(output_tensor, input_tensor, group, "data")
        if async_op:
            return work
        work.wait()
        return None


def divide(decoder: Decoder, ranks: Ranks) -> dict[str, Holding]:
    """Leave in ``decoder`` this rank's pieces of its stage's parameters, whose rows ``shard_decoder`` may share out. Returns
    how the ranks of a replica will hold each.

    Rows are shared out among all that would hold the same otherwise: ``shard`` ranks, those of a sequence, and of what is no
    expert those of ``expert``.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    cuts: dict[str, tuple[tuple[str, ...], Cut | None]] = dict.fromkeys(shapes, ((), None))
    for axes, cut in ((("tensor",), cut_decoder), (expert_axes(ranks), share_experts)):
        if ranks.size(*axes) > 1:
            cuts |= {name: (axes, how) for name, how in cut(decoder, ranks).items()}
    found = {}
    for name, shape in shapes.items():
        axes, how = cuts[name]
        rows = tuple(shared for shared in sharing(ranks) if shared not in axes)
        place = (("pipeline", stage_of(name, decoder, ranks)),) if ranks.size("pipeline") > 1 else ()
        found[name] = Holding(shape, axes, how, rows, place)
    keep_stage(decoder, ranks)
    return found


def shard_decoder(decoder: Decoder, ranks: Ranks, dtype: torch.dtype, under_way: UnderWay) -> None:
    """Share out the rows of what ``divide`` left in ``decoder``, a block at a time, experts that others have not by themselves;
    embedding, head and final norm are one unit, because embedding and head may be one matrix. Blocks compute in ``dtype``.

    zero = 2 keeps the weights gathered until ``drop_gathered``, 3 gathers a block's for each pass. Where no other stage comes
    between, the last block's stay for its backward pass, and the first block's from there for the next micro-batch, as do those
    outside of the blocks for the whole step. Frozen weights are cut and gathered as well;
    of matrices in NF4 the codes, and the scales, a thirtieth of them, stay whole.

    A block's weights are gathered while the one before it computes, and its gradients are reduced while the next ones do: those
    reductions are ``under_way`` when a backward pass has ended.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    own = ranks.at("pipeline")
    for module in decoder.modules():
        if isinstance(module, Nf4Linear | Nf4Experts):  # FSDP2 cuts parameters alone
            codes = module.get_buffer("codes")
            del module.codes
            module.codes = nn.Parameter(codes, requires_grad=False)
    elsewhere = {parameter for name, parameter in decoder.named_parameters() if stage_of(name, decoder, ranks) != own}
    for parameter in elsewhere:
        if parameter.is_floating_point():  # a copy of the embedding
            parameter.data = parameter.data.to(dtype)
    keeps = ranks.layout.zero == 2
    blocks: list[list[Any]] = [[decoder.blocks[layer] for layer in layers] for layers in own_layers(decoder, ranks)]
    is_whole = ranks.size("pipeline") == 1
    first, last = (set(blocks[0][end].modules()) if is_whole else set() for end in (0, -1))
    for module in decoder.modules() if ranks.size("expert") > 1 else ():
        if isinstance(module, ExpertMatrix | Nf4Experts | LowRankExperts):
            same = ranks.mesh(*(axis for axis in sharing(ranks) if axis != "expert"))
            fully_shard(module, mesh=same, reshard_after_forward=not keeps and module not in last, mp_policy=policy)
    mesh = ranks.mesh(*sharing(ranks))
    for unit in (*itertools.chain(*blocks), decoder):
        reshards = not keeps and unit is not decoder and unit not in last
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy, ignored_params=elsewhere)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OrderedReduceScatter(dtype, ranks, under_way))  # type: ignore[arg-type]
            module.set_custom_all_gather(CountedAllGather())  # type: ignore[arg-type]
            stays = keeps or module in first or (is_whole and module is decoder)
            module.set_reshard_after_backward(not stays, recurse=False)
            if not torch.cuda.is_available():  # else gathers have a stream
                module._set_unshard_async_op(True)
    # Torch would guess by the order of forward passes, which several micro-batches under way do not keep.
    for chunk in [[decoder], *blocks]:
        for before, unit in zip((chunk[0], *chunk), chunk, strict=False):
            unit.set_modules_to_backward_prefetch([before])
            before.set_modules_to_forward_prefetch([unit])
    if is_whole:
        root: Any = decoder
        root.set_modules_to_forward_prefetch([blocks[0][0]])
    register_fsdp_forward_method(decoder, "stage")


def sharing(ranks: Ranks) -> tuple[str, ...]:
    """The axes along which ``shard_decoder`` shares out rows of what is no expert."""
    return tuple(axis for axis in ("shard", "expert", "context") if ranks.size(axis) > 1) if ranks.size("shard") > 1 else ()


def check_layout(recipe: TrainRecipe, spec: ModelSpec, layout: ParallelRecipe) -> None:
    """Raise ConfigError if ``layout`` cannot cut what ``recipe`` trains."""
    check_tensor(recipe, spec, layout.tensor, layout.context)
    check_context(recipe, spec, layout.context)
    check_expert(recipe, spec, layout.expert, layout.tensor)
    check_pipeline(spec, layout.pipeline, layout.interleave)


def chunk_of(decoder: Decoder, ranks: Ranks) -> ChunkFunction:
    """The loss of a chunk of rows by ``decoder``'s head, which tensor parallel cuts."""
    return chunk_loss if ranks.layout.tensor == 1 else chunk_of_cut(decoder.spec, ranks)


def drop_gathered(decoder: nn.Module) -> None:
    """Drop the gathered weights of each unit of ``decoder``, which ``shard_decoder`` made."""
    from torch.distributed.fsdp import FSDPModule

    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_weights(decoder: nn.Module) -> None:
    """Gather the weights of each unit of ``decoder``, which ``shard_decoder`` made. All ranks call it together."""
    from torch.distributed.fsdp import FSDPModule

    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def why_not_compile(device: torch.device) -> str | None:
    """A sentence on what ``torch.compile`` lacks on ``device``; None if it should work."""
    if device.type != "cpu":
        return None  # Triton comes with torch's CUDA packages
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        return f"no C++ compiler ({compiler}) is on PATH (Debian: apt-get install g++)"
    return None


def compile_blocks(decoder: nn.Module, chunk: ChunkFunction = chunk_loss) -> ChunkFunction:
    """Compile each block of ``decoder`` in place, and return ``chunk``, which is that of the loss, compiled.

    Blocks are compiled one by one because they share one graph: the time to compile does not grow with depth, and the code
    between them stays plain Python. With ``dynamic=False`` shapes are static, which gives faster code; all batches of a run
    have one shape. Beside a frozen embedding the first block's input would need no gradient, and its graph would be another:
    14 of 31 seconds of compiling adapters on two cores.
    """
    decoder.get_submodule("embed").register_forward_hook(_needs_gradient)
    for block in decoder.get_submodule("blocks").children():
        block.compile(dynamic=False)
    compiled: ChunkFunction = torch.compile(chunk, dynamic=False)
    return compiled


def _needs_gradient(module: nn.Module, arguments: object, embedded: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not embedded.requires_grad:
        embedded.requires_grad_()


def undo_compile(decoder: nn.Module) -> None:
    """Run the blocks uncompiled again. torch has no public inverse of ``compile``."""
    for block in decoder.get_submodule("blocks").children():
        block._compiled_call_impl = None


@contextmanager
def eager(decoder: nn.Module) -> Iterator[None]:
    """A context in which the blocks run uncompiled. Scoring in the middle of a run has other shapes, and each would be
    compiled."""
    blocks = list(decoder.get_submodule("blocks").children())
    compiled = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = call
