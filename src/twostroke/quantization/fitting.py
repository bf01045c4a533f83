"""Codes of a whole model, block after block, each fitted to what the blocks before it really bring; and what that costs.

Two streams of activations run side by side, the exact model's and the rounded one's. A matrix W that gives W·x in the one
reads x̂ in the other, so it is first moved towards W·(Σ x·x̂ᵀ)·(Σ x̂·x̂ᵀ)⁻¹, which brings the exact output back from the rounded
input (Li et al. 2025, "GPTAQ", arXiv:2504.02692), then rounded with compensation for x̂. Rows that nothing is fitted to are
judged at the end of both streams; where they differ by more than is allowed, the matrices that matter most for their size go to
int8. Several ways to hold one model are fitted in one walk, with one exact stream for all of them.

KL to the exact model in 1e-3 nats a token on held-out stories, stories260K, groups of 64, measured in this order: all matrices
on exact inputs 94; scales beforehand and largest inputs first 86; rounded inputs 88; moved half way 66, moved all the way 67.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from twostroke.core.matrices import Matrix
from twostroke.core.matrices import block as parts_of_block
from twostroke.core.policy import MAX_KL_NATS
from twostroke.core.schemes import SCHEMES, Scheme
from twostroke.kernels.codes import Codes, quantize
from twostroke.kernels.features import has_packed_linear
from twostroke.kernels.int4 import group_scales, round_to_groups
from twostroke.kernels.matrix import quantize_rows
from twostroke.model.attention import masks_of
from twostroke.model.rope import tables_by_layer
from twostroke.planner.work.params import count_parameters
from twostroke.quantization.awq import Fold, fold_scales, folds, search_scales, shared
from twostroke.quantization.gptq import round_with_compensation
from twostroke.quantization.kept_codes import KeptCodes
from twostroke.quantization.roundings import DEFAULT_ROUNDING, ROUNDINGS, Rounding

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from twostroke.model.decoder import Decoder

PASSES = 5
"""Most times that the model is rounded, each time with more matrices in int8."""

LARGE_PARAMETERS = 100e6
"""Above it blocks are computed in bf16 where the processor has products of it: both streams alike, and many times as fast."""

SENSITIVITY_TOKENS = 1024
"""Tokens by which single matrices are judged; their order is all that is asked."""

LEAST_EXPERT_ROWS = 32
"""Rows below which an expert's matrix goes to its nearest codes: too few to tell which of its inputs matter."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Judgement:
    """On ``n_tokens`` tokens that nothing was fitted to, activations rounded where the engine's products round them:
    KL(exact ‖ rounded) in nats a token, and the rounded model's perplexity divided by the exact one's."""

    kl_nats: float
    perplexity_ratio: float
    n_tokens: int


class Scaled(NamedTuple):
    """By what a tensor's rows were divided and its columns multiplied before rounding; None: by nothing."""

    rows: Float[Tensor, " n"] | None = None
    columns: Float[Tensor, "copies k"] | None = None

    def of(self, tensor: Float[Tensor, "n ..."]) -> Tensor:
        """``tensor`` so scaled."""
        if self.rows is not None:
            tensor = tensor / (self.rows if tensor.dim() == 1 else self.rows[:, None])
        if self.columns is not None:
            tensor = (tensor.unflatten(0, (len(self.columns), -1)) * self.columns[:, None]).flatten(0, 1)
        return tensor

    def undone(self, values: Float[Tensor, "n k"]) -> Tensor:
        """What ``values`` of the scaled matrix stand for in the unscaled model."""
        if self.columns is not None:
            values = (values.unflatten(0, (len(self.columns), -1)) / self.columns[:, None]).flatten(0, 1)
        return values if self.rows is None else values * self.rows[:, None]


@dataclass(frozen=True)
class Fitted:
    """``codes`` by canonical name; ``int8`` names the matrices that are better held in int8. ``judgement`` is None where the
    text was a single row. ``scaled`` are the tensors that were scaled first, ``norms`` those of norms, as they became;
    ``nearest`` counts experts' matrices that too few rows reached."""

    codes: Mapping[str, Codes]
    int8: frozenset[str]
    judgement: Judgement | None
    n_tokens: int
    scaled: Mapping[str, Scaled] = field(default_factory=dict)
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    nearest: int = 0

    def source(self, canonical: str, tensor: Tensor) -> Tensor:
        """The tensor that is rounded or kept for ``tensor`` of the model."""
        if canonical in self.norms:
            return self.norms[canonical]
        return self.scaled[canonical].of(tensor.float()) if canonical in self.scaled else tensor


@dataclass(frozen=True)
class Way:
    """One way to hold a model: the scheme, how its codes are found, and the matrices that are in the scheme beside it."""

    scheme: Scheme
    rounding: Rounding
    beside: frozenset[str] = frozenset()

    @property
    def fits(self) -> bool:
        """Whether text changes its codes."""
        return self.rounding.fitted and self.scheme.group is not None


@torch.inference_mode()
def fit_codes(
    decoder: Decoder,
    batches: Sequence[Int[Tensor, "B T"]],
    group: int,
    max_kl_nats: float = MAX_KL_NATS,
    progress: Progress | None = None,
    rounding: Rounding = ROUNDINGS[DEFAULT_ROUNDING],
    folder: Path | None = None,
) -> Fitted:
    """Codes for all matrices of ``decoder``'s blocks, fitted to seven eighths of ``batches`` and judged on the rest.

    The decoder is left as it was. Memory beside it: the codes (a byte a weight; with a ``folder`` they wait in a file there),
    one block twice, sums of its inputs in fp64, the inputs of one block's matrices, and the activations of all tokens between
    two blocks, twice.
    """
    text, way = Text.of(batches), Way(SCHEMES[f"int4-g{group}"], rounding)
    (first,) = fit_ways(decoder, text, [way], progress, folder=folder)
    return within(decoder, text, way, first, max_kl_nats, progress, folder)


class Text(NamedTuple):
    """Rows to fit to, and rows to judge by."""

    fitted_to: Int[Tensor, "n T"]
    judged: Int[Tensor, "m T"]

    @classmethod
    def of(cls, batches: Sequence[Int[Tensor, "B T"]]) -> Text:
        rows = torch.cat(list(batches))
        n_judged = len(rows) // 8 or min(1, len(rows) - 1)
        return cls(rows[: len(rows) - n_judged], rows[len(rows) - n_judged :])


@torch.inference_mode()
def within(
    decoder: Decoder,
    text: Text,
    way: Way,
    fitted: Fitted,
    max_kl_nats: float,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> Fitted:
    """``fitted``, which ``fit_ways`` found, with so many matrices in the scheme beside it that its KL is at most
    ``max_kl_nats``: those with the most KL a weight first. What one matrix costs is measured with that one rounded alone."""
    tell = progress or (lambda done, note: None)
    sensitivity: dict[str, float] = {}
    allowed = max_kl_nats
    for number in range(1, PASSES):
        judged = fitted.judgement
        if judged is None or judged.kl_nats <= max_kl_nats or not fitted.codes:
            break
        if not sensitivity:
            sensitivity = _sensitivities(decoder, text.judged, fitted, tell)
        # What single matrices cost adds up to what all of them cost but for a factor, which the last pass shows.
        factor = judged.kl_nats / max(sum(sensitivity[name] for name in fitted.codes), 1e-12)
        allowed *= 1.0 if number == 1 else max_kl_nats / judged.kl_nats
        chosen = _promoted(sensitivity, {name: decoder.get_parameter(name).numel() for name in sensitivity}, fitted.int8,
                           allowed / factor if number < PASSES - 1 else 0.0)  # fmt: skip
        (fitted,) = fit_ways(decoder, text, [Way(way.scheme, way.rounding, chosen)], tell, folder=folder)
    return fitted


def _promoted(sensitivity: dict[str, float], sizes: dict[str, int], already: frozenset[str], allowed: float) -> frozenset[str]:
    """``already`` and the matrices with the most harm a weight, one at least, until the harm of those left is at most
    ``allowed``."""
    chosen = set(already)
    left = sum(value for name, value in sensitivity.items() if name not in chosen)
    for name in sorted(sensitivity, key=lambda n: sensitivity[n] / sizes[n], reverse=True):
        if left <= allowed and len(chosen) > len(already):
            break
        if name not in chosen:
            chosen.add(name)
            left -= sensitivity[name]
    return frozenset(chosen)


@torch.inference_mode()
def fit_ways(
    decoder: Decoder,
    text: Text,
    ways: Sequence[Way],
    progress: Progress | None = None,
    keep: Sequence[Way] | None = None,
    folder: Path | None = None,
) -> list[Fitted]:
    """The codes of each way, and what they cost, in one walk over the blocks. Every way has a rounded stream of its own; what
    the exact model brings to each matrix, and the scales of its inputs, are found once. ``keep``: the ways whose codes are
    wanted; None: all. Memory beside ``fit_codes``': a stream a way."""
    tell = progress or (lambda done, note: None)
    walk = _Walk(decoder, text.fitted_to.shape[1])
    fitted_to = [walk.embed(t) for t in text.fitted_to.split(_Walk.ROWS)] if any(way.fits for way in ways) else []
    judged = [walk.embed(t) for t in text.judged.split(_Walk.ROWS)] if len(text.judged) else []
    models = [_Model(walk, way, fitted_to, judged, keep is None or way in keep, folder) for way in ways]
    n_blocks = len(decoder.blocks)
    for i, block in enumerate(decoder.blocks):
        seen = _Seen(decoder, i)
        with _hooked(block, seen.names, seen.hear):
            fitted_to = [walk.block(i, block, x) for x in fitted_to]
        judged = [walk.block(i, block, x) for x in judged]
        for number, model in enumerate(models):
            tell((i + number / len(models)) / n_blocks, f"block {i + 1} of {n_blocks}, {model.way.scheme.name}")
            model.round_block(i, block, seen)
    judgements = _judge(decoder, judged, [model.judged for model in models], text.judged)
    return [model.fitted(text.fitted_to.numel(), one) for model, one in zip(models, judgements, strict=True)]


class _Rows(NamedTuple):
    """Inputs of a matrix; of experts sorted by expert, expert e's ending before ``ends[e]``."""

    x: Float[Tensor, "rows k"]
    ends: Int[Tensor, " X"] | None = None

    @classmethod
    def of(cls, inputs: tuple[Tensor, ...]) -> _Rows:
        return cls(inputs[0].flatten(0, -2).float(), inputs[1] if len(inputs) > 1 else None)

    def by_copy(self) -> tuple[Tensor, ...]:
        """Those of each matrix that is stored as one with others, or all of them."""
        return (self.x,) if self.ends is None else self.x.tensor_split(self.ends[:-1])


class _Seen:
    """What the exact model's block ``layer`` brings to each of its matrices, and what follows from it for every way."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        self.layer, self.block = layer, decoder.blocks[layer]
        self.matrices = [m for m in parts_of_block(decoder.spec, layer) if isinstance(m, Matrix) and not m.chooses]
        self.names = [m.module for m in self.matrices]
        self.rows: dict[str, list[_Rows]] = {name: [] for name in self.names}
        self._folds = tuple(folds(decoder.spec, layer))
        self._hessians: dict[str, list[Tensor]] = {}
        self._scales: dict[int, list[tuple[Fold, Tensor]]] = {}

    def hear(self, name: str, inputs: tuple[Tensor, ...]) -> None:
        self.rows[name].append(_Rows.of(inputs))

    def by_copy(self, name: str) -> list[Tensor]:
        """All rows that each matrix of ``name`` reads."""
        return [torch.cat(parts) for parts in zip(*(rows.by_copy() for rows in self.rows[name]), strict=True)]

    def hessians(self, name: str) -> list[Tensor]:
        """Σ x·xᵀ of each matrix of ``name``."""
        if name not in self._hessians:
            self._hessians[name] = [x.t() @ x for x in self.by_copy(name)]
        return self._hessians[name]

    def scales(self, group: int) -> list[tuple[Fold, Float[Tensor, "copies k"]]]:
        """The scales of inputs of every matrix that gains by them."""
        if group not in self._scales:
            found = ((fold, self._search(fold, group)) for fold in self._folds)
            self._scales[group] = [(fold, scale) for fold, scale in found if bool((scale != 1).any())]
        return self._scales[group]

    def _search(self, fold: Fold, group: int) -> Tensor:
        copies = self.by_copy(fold.reader)
        sizes = torch.stack([x.abs().mean(dim=0) if len(x) >= LEAST_EXPERT_ROWS else torch.ones(x.shape[1]) for x in copies])
        weights = _weight(self.block, fold.reader).float().unflatten(0, (len(copies), -1))
        each = zip(weights, self.hessians(fold.reader), shared(fold, sizes), strict=True)
        found = [search_scales(weight, hessian, size, group) for weight, hessian, size in each]
        return torch.stack([torch.ones(x.shape[1]) if one is None else one for x, one in zip(copies, found, strict=True)])


class _Model:
    """A model whose blocks are rounded in one way, and its streams: of the rows that it is fitted to, and of those that judge
    it."""

    def __init__(
        self, walk: _Walk, way: Way, fitted_to: list[Tensor], judged: list[Tensor], keep: bool, folder: Path | None
    ) -> None:
        self.walk, self.way, self.keep = walk, way, keep
        self.fitted_to = list(fitted_to) if way.fits and way.rounding.compensated else []
        self.judged = list(judged)
        self.codes: MutableMapping[str, Codes] = {} if folder is None else KeptCodes(folder)
        self.scaled: dict[str, Scaled] = {}
        self.norms: dict[str, Tensor] = {}
        self.nearest = 0

    def round_block(self, i: int, block: nn.Module, seen: _Seen) -> None:
        own = copy.deepcopy(block)
        if self.way.fits and self.way.rounding.scaled:
            self._scale(i, own, seen)
        for name in seen.names:
            canonical = f"blocks.{i}.{name}.weight"
            weight = _weight(own, name).float()
            if canonical in self.way.beside:
                codes = quantize(weight, SCHEMES[str(self.way.scheme.beside)])
            else:
                codes = self._codes(i, own, name, weight, seen)
                if self.keep:
                    self.codes[canonical] = codes
            _weight(own, name).copy_(codes.values())
        self.fitted_to = [self.walk.block(i, own, x) for x in self.fitted_to]
        with _hooked(own, seen.names if self.way.scheme.rounds_inputs else (), _in_eight_bits):
            self.judged = [self.walk.block(i, own, x) for x in self.judged]

    def _scale(self, i: int, own: nn.Module, seen: _Seen) -> None:
        for fold, scale in seen.scales(self.way.scheme.group or 0):
            columns, rows = fold_scales(own, fold, scale)
            reader = f"blocks.{i}.{fold.reader}.weight"
            self.scaled[reader] = self.scaled.get(reader, Scaled())._replace(columns=columns)
            parameters = own.get_submodule(fold.source).named_parameters()
            for name, parameter in parameters:
                canonical = f"blocks.{i}.{fold.source}.{name}"
                if fold.source in seen.names:
                    self.scaled[canonical] = self.scaled.get(canonical, Scaled())._replace(rows=rows)
                else:
                    self.norms[canonical] = parameter.clone()

    def _codes(self, i: int, own: nn.Module, name: str, weight: Tensor, seen: _Seen) -> Codes:
        group, rounding = self.way.scheme.group, self.way.rounding
        if not self.way.fits or group is None:
            return quantize(weight, self.way.scheme)
        columns = self.scaled.get(f"blocks.{i}.{name}.weight", Scaled()).columns
        n_copies = len(seen.rows[name][0].by_copy())
        if n_copies > 1:
            return self._experts(i, own, name, weight.unflatten(0, (n_copies, -1)), columns, seen)
        if not rounding.compensated:
            (hessian,) = seen.hessians(name)
            return _by_importance(weight, group, torch.diag(hessian) / (1.0 if columns is None else columns[0].square()))
        k = weight.shape[1]
        hessian, cross = torch.zeros(k, k), torch.zeros(k, k)
        for (exact, _), y in zip(seen.rows[name], self.fitted_to, strict=True):
            wanted = exact if columns is None else exact / columns
            found = self.walk.inputs(i, own, name, y).x
            hessian += found.t() @ found
            cross += (wanted - found).t() @ found
        return Codes(*round_with_compensation(weight, hessian, group, cross))

    def _experts(
        self, i: int, own: nn.Module, name: str, weights: Float[Tensor, "X n k"], columns: Tensor | None, seen: _Seen
    ) -> Codes:
        """Each expert is fitted to the rows that chose it; the exact model may have chosen others, so there is no exact row
        beside a rounded one."""
        group, compensated = self.way.scheme.group, self.way.rounding.compensated
        assert group is not None
        if compensated:
            parts = [self.walk.inputs(i, own, name, y).by_copy() for y in self.fitted_to]
            copies = [torch.cat(part) for part in zip(*parts, strict=True)]
        else:
            copies = seen.by_copy(name)
            copies = copies if columns is None else [x / one for x, one in zip(copies, columns, strict=True)]
        found: list[Codes] = []
        for weight, x in zip(weights, copies, strict=True):
            if len(x) < LEAST_EXPERT_ROWS:
                self.nearest += 1
                found.append(quantize(weight, self.way.scheme))
            elif compensated:
                found.append(Codes(*round_with_compensation(weight, x.t() @ x, group)))
            else:
                found.append(_by_importance(weight, group, x.square().sum(dim=0)))
        codes, scale, zero = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        return Codes(codes, scale, zero)

    def fitted(self, n_tokens: int, judgement: Judgement | None) -> Fitted:
        return Fitted(self.codes, self.way.beside, judgement, n_tokens, self.scaled, self.norms, self.nearest)


class _Walk:
    """The decoder's forward pass a block at a time: what ``Decoder.hidden`` does between the embedding and the last norm."""

    ROWS = 8

    def __init__(self, decoder: Decoder, n_tokens: int) -> None:
        self.decoder, spec = decoder, decoder.spec
        self.positions = torch.arange(n_tokens)[None]
        self.ropes = tables_by_layer(spec, self.positions)
        masks = masks_of(spec, None, self.ROWS, n_tokens, torch.device("cpu"), torch.float32, training=False)
        self.masks = [masks[spec.window_of_layer(i)] for i in range(spec.n_layers)]
        self.in_bf16 = count_parameters(spec).total > LARGE_PARAMETERS and has_packed_linear(torch.bfloat16)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T E"]:
        x = self.decoder.embedded(tokens)
        return x if self.decoder.position_embed is None else x + self.decoder.position_embed(self.positions)

    def block(self, i: int, block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.in_bf16):
            result: Tensor = block(x, self.ropes[i], self.masks[i])
        return result

    def inputs(self, i: int, block: nn.Module, name: str, x: Float[Tensor, "B T E"]) -> _Rows:
        """What the matrix ``name`` reads; the block is not computed beyond it."""

        def stop(name: str, inputs: tuple[Tensor, ...]) -> None:
            raise _ReachedError(_Rows.of(inputs))

        with _hooked(block, (name,), stop):
            try:
                self.block(i, block, x)
            except _ReachedError as reached:
                return reached.rows
        raise AssertionError(f"{name} is not part of its block's computation")


class _ReachedError(Exception):
    """Ends a block's computation at the matrix that was asked for."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self.rows = rows


Hook = Callable[[str, tuple[Tensor, ...]], tuple[Tensor, ...] | None]


@contextmanager
def _hooked(block: nn.Module, names: Sequence[str], hook: Hook) -> Iterator[None]:
    """``hook`` hears the inputs of each matrix of ``names`` before it is computed, and may return others."""

    def hear(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return hook(name, inputs)

    with ExitStack() as stack:
        for name in names:
            handle = block.get_submodule(name).register_forward_pre_hook(functools.partial(hear, name))
            stack.callback(handle.remove)
        yield


def _in_eight_bits(name: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Rows as the native library's products read them."""
    x, *others = inputs
    codes, scale = quantize_rows(x.flatten(0, -2))
    return ((codes.float() - 128.0).mul_(scale).view(x.shape).to(x.dtype), *others)


def _weight(block: nn.Module, name: str) -> Tensor:
    return block.get_parameter(f"{name}.weight")


def _by_importance(weight: Tensor, group: int, importance: Float[Tensor, " k"]) -> Codes:
    """The nearest codes, their scales chosen by what each input is worth."""
    scales, zeros = group_scales(weight, group, importance)
    return Codes(round_to_groups(weight, scales, zeros, group), scales, zeros)


def _judge(decoder: Decoder, exact: list[Tensor], others: list[list[Tensor]], tokens: Tensor) -> list[Judgement | None]:
    """Of each of ``others``, streams before the last norm in the same batches as ``exact``; None where there are no tokens."""
    if not len(tokens):
        return [None] * len(others)
    divergence, worse = [0.0] * len(others), [0.0] * len(others)
    ids = (row for row in tokens)
    for x, *batches in zip(exact, *others, strict=True):
        for one, *rows in zip(x, *batches, strict=True):
            p, targets = _log_probabilities(decoder, one), next(ids)[1:, None]
            for number, row in enumerate(rows):
                q = _log_probabilities(decoder, row)
                divergence[number] += float((p.exp() * (p - q)).sum(dtype=torch.float64))
                worse[number] += float((p[:-1].gather(1, targets) - q[:-1].gather(1, targets)).sum(dtype=torch.float64))
    n, n_next = tokens.numel(), tokens.numel() - len(tokens)
    return [Judgement(d / n, math.exp(w / n_next), n) for d, w in zip(divergence, worse, strict=True)]


def _log_probabilities(decoder: Decoder, stream: Float[Tensor, "T E"]) -> Float[Tensor, "T V"]:
    return decoder.logits(decoder.read_out(stream)).float().log_softmax(-1)


def _sensitivities(decoder: Decoder, judged: Tensor, fitted: Fitted, tell: Progress) -> dict[str, float]:
    """KL of the model with one matrix rounded, for each of ``fitted``'s codes; less than nothing cannot be. Streams of a
    block's matrices go on together, because each block may be read for it."""
    rows = judged[: max(1, SENSITIVITY_TOKENS // judged.shape[1])]
    walk = _Walk(decoder, rows.shape[1])
    streams = [walk.embed(rows)]
    for i, block in enumerate(decoder.blocks):
        streams.append(walk.block(i, block, streams[-1]))
    of_block: dict[int, list[str]] = {}
    for canonical in fitted.codes:
        of_block.setdefault(int(canonical.split(".")[1]), []).append(canonical)
    found: dict[str, float] = {}
    for first, names in of_block.items():
        tell(len(found) / len(fitted.codes), f"what matrices of block {first + 1} cost")
        others = {}
        for canonical in names:
            own = copy.deepcopy(decoder.blocks[first])
            weight = fitted.scaled.get(canonical, Scaled()).undone(fitted.codes[canonical].values())
            own.get_parameter(canonical.removeprefix(f"blocks.{first}.")).copy_(weight)
            others[canonical] = walk.block(first, own, streams[first])
        for i in range(first + 1, len(decoder.blocks)):
            block = decoder.blocks[i]
            others = {canonical: walk.block(i, block, x) for canonical, x in others.items()}
        for canonical, x in others.items():
            (one,) = _judge(decoder, [streams[-1]], [[x]], rows)
            assert one is not None
            found[canonical] = max(0.0, one.kl_nats)
    return found
