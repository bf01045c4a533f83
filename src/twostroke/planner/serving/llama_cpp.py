"""Seconds of one llama.cpp step on devices known by their datasheet: kernel by kernel, as its graph of May 2024 runs them.

A step of r rows takes, summed over the stages that layers are split over,

    Σ_matrices max(read, multiply) + attention + elementwise bytes/(β·share) + kernels·kernel_s + (stages − 1)·stage_s

    few rows     read = bytes/(β·share), multiply = r·weights·slots/(lanes·slot share): decoding codes on units without
                 integer dot products; with them, up to 32 rows, r·weights/(4·lanes·share)
    many rows    multiply = 2·⌈r/tile⌉·tile·weights/(peak·share), and before it, where the backend expands codes to fp16,
                 (bytes + 2·weights)/(β·share)
    attention    one row reads its cache; of more rows the scores of all heads go through memory, in fp32

with β the memory's bandwidth. A prompt is computed 512 rows at a time; over several devices up to four such pieces are under
way at once. What each constant is and who measured it stands in ``llama_cpp.toml``; how far the plans are off on 152 public
rows in benchmarks/planner/local_llama_cpp.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError, CorruptFileError
from twostroke.core.matrices import LayerKind, Matrix, head_matrix, layer_kinds
from twostroke.core.named import inputs, named
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.money.power import busy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.step_time import MOE_OPERATORS
from twostroke.planner.serving.strategy import Chunk, Step, Strategy
from twostroke.planner.work.component import Work, bound_of, merge, total_seconds
from twostroke.planner.work.weights import embedding_bytes, experts_touched, head_bytes, matrix_bytes, quantises, weights_bytes

FILE = Path(__file__).with_name("llama_cpp.toml")

UBATCH_ROWS = 512
"""Rows of a prompt that are computed at once (``--ubatch-size``)."""

BATCH_ROWS = 2048
"""Tokens that one call computes at most (``--batch-size``)."""

PIECES_UNDER_WAY = 4
"""Pieces of a prompt that are under way over several devices (``GGML_SCHED_MAX_COPIES``)."""

VECTOR_ROWS = 8
"""Rows up to which kernels multiply codes as they read them, one row after another (``MMVQ_MAX_BATCH_SIZE``)."""

INTEGER_ROWS = 32
"""Rows up to which codes are multiplied by integer dot products where matrix units are there (``MMQ_MAX_BATCH_SIZE``)."""

INTEGER_SHARE = 0.25
"""Share of the lanes' rate, four products an instruction, that such kernels reach. Assumed."""

SUPER_BLOCK = 256
"""Inputs of a block with two levels of scales, the K-quants: their codes cost more to read than older ones'."""


@dataclass(frozen=True)
class Backend:
    """What llama.cpp does and reaches on one make of device. Shares are of the datasheet's rate; kernels are of one layer."""

    bandwidth_share: float
    product_share: float  # of the 16-bit peak, at hundreds of rows
    kernel_s: float
    cache_share: float  # of bandwidth, where one new token reads its cache
    stage_s: float
    norm_kernels: float
    attention_kernels: float
    mlp_kernels: float
    score_bytes: float  # moved for one query, key and head of a prompt
    converted_bytes: float  # moved for each input and output of a product of many rows
    expands: float  # 1: codes are written out in fp16 before a product of many rows
    rereads: float  # 1: each query head reads its group's keys anew
    code_slots: float  # instructions of one lane that decode a weight and multiply it
    slot_share: float  # of the lanes' rate, that such kernels reach
    tile_rows: float


@lru_cache(maxsize=1)
def backends() -> dict[str, Any]:
    """``llama_cpp.toml`` as it stands. Raises CorruptFileError."""
    try:
        return tomllib.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CorruptFileError(f"{FILE.name} of the installed package is not readable: {error}.") from None


def backend_of(hardware: Hardware) -> Backend:
    """The backend that an accelerator's maker has, told by the first word of its label; a processor's is the other one."""
    table = backends()["backend"]
    maker = (hardware.accelerator or "none").split()[0]
    row = next((row for row in table.values() if maker in row["makers"]), table["other"])
    return Backend(**{f.name: float(row["constants"][f.name]["value"]) for f in fields(Backend)})


class Piece(NamedTuple):
    """Rows of a prompt that are computed at once, and the keys that there are at their end."""

    rows: int
    keys: int


def _pieces(begin: int, end: int) -> list[Piece]:
    """Of a prompt whose first ``begin`` tokens are cached."""
    starts = range(begin, end, UBATCH_ROWS)
    return [Piece(min(UBATCH_ROWS, end - start), min(start + UBATCH_ROWS, end)) for start in starts]


class LlamaCpp(Strategy):
    """llama.cpp with all layers on the device; ``pipeline`` devices hold consecutive layers and work one after another."""

    token_budget = BATCH_ROWS
    most_pages: int | None = None
    note = (
        "llama.cpp as of May 2024 with flash attention off; layers split over devices work one after another. "
        "On public rows that its constants were not fitted to, benchmarks/planner/local_llama_cpp says how far off it is."
    )

    def __init__(self, spec: ModelSpec, shape: ServingShape, hardware: Hardware) -> None:
        super().__init__(spec, shape, hardware)
        if shape.placement.stage_devices > 1:
            raise ConfigError(
                f"tensor={shape.tensor} and expert={shape.expert}: llama.cpp gives each device its own layers. "
                f"Use --pipeline {shape.placement.stage_devices}."
            )
        self.backend = inputs(backend_of(hardware))
        peaks = hardware.peak_flop_per_s
        self.peak = next(peaks[name] for name in ("fp16_fp16", "fp16", "bf16", "fp32") if name in peaks)
        self.lanes_per_s = peaks.get("fp32", self.peak) / 2
        self.bytes_per_s = hardware.read_bandwidth[0].bytes_per_s
        self.reading = self.bytes_per_s * self.backend.bandwidth_share

    # -- memory

    def weights_bytes(self) -> float:
        """Of one device, the one with the head: its layers; the embedding stays with the host."""
        whole, head = weights_bytes(self.spec, self.shape.scheme), head_bytes(self.spec, self.shape.scheme)
        layers = whole - embedding_bytes(self.spec, self.shape.scheme) - (0.0 if self.spec.tied_embeddings else head)
        stages = min(self.shape.pipeline, self.spec.n_layers)
        held = layers * -(-self.spec.n_layers // stages) / self.spec.n_layers + head
        return named("weights_bytes", held, "bytes", "the layers of one device and the head; the embedding is with the host")

    def working_bytes(self) -> float:
        """Scores of a piece of the prompt, in fp32, with its mask, and its rows through one layer."""
        rows = min(self.shape.prompt_tokens, UBATCH_ROWS)
        keys = self.shape.prompt_tokens + self.shape.output_tokens
        scores = 4.0 * rows * keys * (self.spec.n_heads + 1)
        across = 4.0 * rows * (4 * self.spec.d_model + 3 * self.spec.d_ff)
        return named("activations_bytes", scores + across, "bytes", "scores of 512 rows in fp32, and the rows through a layer")

    # -- time

    def decode(self, batch: int | None = None) -> tuple[Work, ...]:
        return self._pass(float(batch or self.shape.batch), self.shape.context)

    def prefill(self) -> tuple[Work, ...]:
        shape = self.shape
        return self._together([self._pass(0.0, 0.0, piece) for piece in _pieces(shape.hit_tokens, shape.prompt_tokens)])

    def step(self, batch: int) -> Step:
        works = self.decode(batch)
        return Step(total_seconds(works), self._hops_s(), bound_of(works), busy_of(works))

    def step_seconds(self, decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        """Decoding rows ride with the first piece of the prompts."""
        pieces = [piece for chunk in chunks for piece in _pieces(chunk.before, chunk.before + chunk.new)]
        first = self._pass(float(decoding), context, pieces[0] if pieces else None)
        return total_seconds(self._together([first, *(self._pass(0.0, 0.0, piece) for piece in pieces[1:])]))

    def added_s(self, prefill_s: float, step_s: float, batch: int | None = None) -> float:
        """A prompt holds up those that decode for as long as it takes: its pieces and their tokens share calls."""
        return prefill_s

    def check_s(self) -> float | None:
        if self.shape.speculation is None:
            return None
        rows = self.shape.batch * (self.shape.speculation.draft_tokens + 1.0)
        return total_seconds(self._pass(rows, self.shape.context))

    def network_s(self) -> tuple[float, float]:
        return len(_pieces(self.shape.hit_tokens, self.shape.prompt_tokens)) * self._hops_s(), self._hops_s()

    def _hops_s(self) -> float:
        return (self.shape.pipeline - 1) * self.backend.stage_s

    def _together(self, passes: Sequence[tuple[Work, ...]]) -> tuple[Work, ...]:
        """Passes over all devices: the first goes through them all, each later one ends a part of its time after the last."""
        works = merge(work for once in passes for work in once)
        at_once = min(self.shape.pipeline, PIECES_UNDER_WAY)
        ratio = (1 + (len(passes) - 1) / at_once) / len(passes)
        return works if ratio == 1 else tuple(work.stretched(ratio) for work in works)

    def _pass(self, decoding: float, context: float, piece: Piece | None = None) -> tuple[Work, ...]:
        """One pass over all layers, by component: ``decoding`` rows with ``context`` before each, and a piece of a prompt."""
        rows, works = decoding + (piece.rows if piece else 0), []
        for kind, count in layer_kinds(self.spec):
            layer = [*(self._product(p, rows) for p in kind.matrices), *self._elementwise(kind, rows)]
            layer += [self._cache(kind, decoding, context)] if decoding else []
            layer += [self._scores(kind, piece)] if piece else []
            works += [work.times(count) for work in layer]
        sampled = decoding + (1.0 if piece else 0.0)
        head = head_matrix(self.spec)
        works.append(self._multiply("head", head.weights, head.weights, head_bytes(self.spec, self.shape.scheme), sampled))
        works.append(Work.limited("head", 0.0, 0.0, 0.0, 0.0, self.backend.kernel_s + self._hops_s()))
        return merge(works)

    def _product(self, p: Matrix, rows: float) -> Work:
        copies = experts_touched(p.copies, p.active, rows) if p.copies > 1 else 1.0
        n_bytes = copies * matrix_bytes(self.spec, p, self.shape.scheme)
        return self._multiply(p.component, copies * p.weights, p.active * p.weights, n_bytes, rows, p)

    def _multiply(
        self, component: str, stored: float, passed: float, n_bytes: float, rows: float, p: Matrix | None = None
    ) -> Work:
        """``rows`` times ``stored`` weights of ``n_bytes``, of which a row passes ``passed``."""
        how = scheme_of(self.shape.scheme)
        coded = how.quantised and (how.head is not None if p is None else quantises(how, p, self.spec.moe is not None))
        many = self._by_tiles(component, stored, passed, n_bytes, rows, coded)
        if rows > (INTEGER_ROWS if coded and self.backend.expands else VECTOR_ROWS):
            return many
        slots = self.backend.code_slots if coded and how.group == SUPER_BLOCK else 0.0
        arithmetic = rows * passed * slots / (self.lanes_per_s * self.backend.slot_share)
        if coded and self.backend.expands and rows > 1:
            arithmetic = rows * passed / (4 * self.lanes_per_s * INTEGER_SHARE)
        few = Work.limited(component, 2.0 * rows * passed, n_bytes, arithmetic, n_bytes / self.reading)
        return few if rows == 1 else min(few, many, key=lambda work: work.seconds)

    def _by_tiles(self, component: str, stored: float, passed: float, n_bytes: float, rows: float, coded: bool) -> Work:
        """The product on matrix units, whose tiles are filled up. Codes are decoded as a tile is loaded, or before."""
        backend, flops = self.backend, 2.0 * rows * passed
        padded = math.ceil(rows / backend.tile_rows) * backend.tile_rows
        decoding = 1 + (backend.code_slots / backend.tile_rows if coded else 0.0)
        arithmetic = 2.0 * padded * passed * decoding / (self.peak * backend.product_share)
        if not (coded and backend.expands):
            return Work.limited(component, flops, n_bytes, arithmetic, n_bytes / self.reading)
        once = Work.limited(component, flops, 2.0 * stored, arithmetic, 2.0 * stored / self.reading)
        moved = n_bytes + 2.0 * stored
        return merge((once, Work.limited(component, 0.0, moved, 0.0, moved / self.reading)))[0]

    def _cache(self, kind: LayerKind, rows: float, keys: float) -> Work:
        """Rows of as many requests read the keys and values before them."""
        heads = kind.n_heads / kind.n_kv_heads if self.backend.rereads and kind.latent_dim is None else 1.0
        n_bytes = rows * keys * kind.kv_elements * bytes_of(self.shape.cache_dtype) * heads
        flops = rows * keys * kind.decode_flops_per_key
        arithmetic = flops / (2 * self.lanes_per_s)
        return Work.limited("attention", flops, n_bytes, arithmetic, n_bytes / (self.bytes_per_s * self.backend.cache_share))

    def _scores(self, kind: LayerKind, piece: Piece) -> Work:
        """Two products with softmax between them, each of which passes its scores on through memory; masked keys too."""
        pairs = piece.rows * piece.keys
        flops, n_bytes = pairs * kind.flops_per_key, pairs * kind.n_heads * self.backend.score_bytes
        arithmetic, memory = flops / (self.peak * self.backend.product_share), n_bytes / self.reading
        return Work("attention", flops, n_bytes, arithmetic, memory, 0.0, arithmetic + memory)

    def _elementwise(self, kind: LayerKind, rows: float) -> Iterator[Work]:
        """What stands between the products, in fp32 and unfused, and starting all kernels of a layer.

        A norm reads and writes twice (its weights apart), a sum moves 12 bytes an element, turning 8, a cache write 6, the
        activation and its product 20.
        """
        backend, spec = self.backend, self.spec
        passed = {"attention": 0.0, "mlp": 0.0}
        inner = 0.0
        for p in kind.matrices:
            passed[p.component] += p.active * (p.n + len(p.parts) * p.k) * backend.converted_bytes
            inner += p.active * p.k if p.name.endswith("down") else 0.0
        if rows <= VECTOR_ROWS:
            passed = dict.fromkeys(passed, 0.0)
        turned = 8.0 * (kind.n_heads + kind.n_kv_heads) * kind.qk_dim + 6.0 * kind.kv_elements
        moved = {
            "norms": 2 * (16.0 + 12.0) * spec.d_model,
            "attention": turned + passed["attention"],
            "mlp": 20.0 * inner + passed["mlp"],
        }
        more = MOE_OPERATORS["mlp"] if kind.mlp == "moe" else 0
        kernels = (backend.norm_kernels, backend.attention_kernels, backend.mlp_kernels + more)
        for (component, n_bytes), count in zip(moved.items(), kernels, strict=True):
            memory = rows * n_bytes / self.reading
            yield Work.limited(component, 0.0, rows * n_bytes, 0.0, memory, count * backend.kernel_s)
