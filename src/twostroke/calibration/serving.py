"""The engine's step from its parts: a fixed time for a step and for each layer, and rates for what grows with tokens and keys.

An operator that starts in a microsecond when it is called in a row takes several inside a step, where everything else has been
through the caches since it ran last. So whole decode steps of a small model are timed, with the engine's own matrices,
attention, cache layout and scheduler in the order of ``engine.interpreter`` (which this room may not import), for few and many
layers and keys; products are taken off at their measured rates, and the rest is what a step and a layer cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.calibration.timing import Clock
from twostroke.core.profile import MachineProfile
from twostroke.core.spec import ModelSpec
from twostroke.kernels.attention import attention, explicit_attention, flash_attention
from twostroke.kernels.crossovers import Crossovers
from twostroke.kernels.matrix import FloatMatrix, Int8Matrix, Matrix
from twostroke.planner.hardware import hardware_from_profile
from twostroke.planner.latency import PREFILL_BLOCK, keys_of_prefill
from twostroke.planner.params import block_products
from twostroke.planner.serving import ServingShape, around_layers, layer_operations, layer_products
from twostroke.planner.weights import weights_bytes
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler, SchedulerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS, HEAD_DIM, D_FF, PAGE, LAYERS = 4, 64, 704, 16, 6
WIDTH = HEADS * HEAD_DIM
LEAST_FIXED_S = 1e-7
LEAST_START_SHARE = 0.2
DECODE_SCHEMES = ("fp32", "bf16", "int8")

SPEC = ModelSpec("llama", 4096, LAYERS, WIDTH, HEADS, HEADS, HEAD_DIM, D_FF, max_positions=4096, tied_embeddings=True)
"""The model whose steps are timed."""


def fixed_and_rate(few: float, many: float, few_s: float, many_s: float) -> tuple[float, float]:
    """(seconds at nothing, units per second) of the line through two measurements. Noise makes neither negative, and no
    operation starts in less than ``LEAST_FIXED_S``."""
    per_unit = max((many_s - few_s) / (many - few), 1e-3 * many_s / many)
    return max(few_s - few * per_unit, LEAST_FIXED_S), 1.0 / per_unit


def layer_elements(rows: int) -> float:
    """Elements that the small operations of one layer read and write: two norms and two sums 9E, turning and storing 4·H·D, the
    activation 3F; the planner's ``elementwise_elements`` of such a block, and the cache's write."""
    return rows * (9.0 * WIDTH + 6.0 * WIDTH + 3.0 * D_FF)


@torch.inference_mode()
def _layer_operations_s(clock: Clock, rows: int, dtype: torch.dtype) -> float:
    """Norms, rotary turn, cache write and activation of ``LAYERS`` layers on many rows, per layer."""
    x, norm = torch.randn(rows, WIDTH).to(dtype), torch.ones(WIDTH, dtype=dtype)
    qkv = torch.randn(rows, 3 * HEADS, HEAD_DIM).to(dtype)
    wide = torch.randn(rows, 2 * D_FF).to(dtype)
    turn = torch.randn(rows, 1, HEAD_DIM // 2, dtype=torch.complex64)
    pool = torch.zeros(LAYERS, 2 * HEADS, rows + PAGE, HEAD_DIM, dtype=dtype)
    slots = torch.arange(rows)

    def layers() -> None:
        for layer in range(LAYERS):
            F.rms_norm(x, norm.shape, norm, 1e-5)
            _turn_and_store(qkv, turn, pool[layer], slots)
            F.rms_norm(x, norm.shape, norm, 1e-5)
            gate, up = wide.chunk(2, dim=-1)
            F.silu(gate).mul_(up)

    return clock.best_s(layers, seconds=0.05, least=4) / LAYERS


def _turn_and_store(qkv: Tensor, turn: Tensor, layer: Tensor, slots: Tensor) -> None:
    turned = qkv[:, : 2 * HEADS]
    values = turned.float()
    torch.view_as_complex(values.view(*values.shape[:2], -1, 2)).mul_(turn)
    if values.dtype != turned.dtype:
        turned.copy_(values)
    layer.index_copy_(1, slots, qkv[:, HEADS:].transpose(0, 1))


def measure_layer_operations(clock: Clock) -> Iterator[tuple[str, float]]:
    """Elements per second of a layer's small operations on the rows of a prompt."""
    for name, dtype in DTYPES.items():
        few_s, many_s = _layer_operations_s(clock, 64, dtype), _layer_operations_s(clock, 512, dtype)
        yield (
            f"layer_operations_{name}_element_per_s",
            fixed_and_rate(layer_elements(64), layer_elements(512), few_s, many_s)[1],
        )


# -- attention ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _attend_one_s(clock: Clock, keys: int, flash: bool) -> float:
    """One token of one request against its cached keys in one layer, bf16."""
    pool = torch.randn(LAYERS, 2 * HEADS, keys, HEAD_DIM).to(torch.bfloat16)
    q = torch.randn(HEADS, 1, 1, 1, HEAD_DIM).to(torch.bfloat16)
    kernel = flash_attention if flash else explicit_attention

    def layers() -> None:
        for layer in range(LAYERS):
            k, v = (half[:, None] for half in pool[layer].split(HEADS))
            kernel(q, k, v, None, HEAD_DIM**-0.5)

    return clock.best_s(layers, seconds=0.03, least=4) / LAYERS


def measure_flash_limit(clock: Clock) -> float:
    """``flash_max_scores``: most (request, KV head, key) triples of a bf16 decode for which the flash kernel is faster."""
    limit = 0.0
    for keys in (32, 64, 128, 256, 512):
        if _attend_one_s(clock, keys, flash=True) > _attend_one_s(clock, keys, flash=False):
            break
        limit = float(HEADS * keys)
    return limit if limit else Crossovers().flash_max_scores / 4


@torch.inference_mode()
def measure_prefill_attention(clock: Clock, lengths: Sequence[int]) -> Iterator[tuple[str, float]]:
    """One prompt's attention in one layer, in blocks of ``PREFILL_BLOCK`` queries up to their last key, FLOP/s counted over the
    keys walked, 4·H·D·Σ queries·keys."""
    for name, dtype in DTYPES.items():
        for tokens in lengths:
            q = torch.randn(tokens, HEADS, HEAD_DIM).to(dtype)
            keys, values = (torch.randn(HEADS, 1, tokens, HEAD_DIM).to(dtype) for _ in range(2))
            size = min(PREFILL_BLOCK, tokens)
            hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
            mask = torch.zeros(1, size, size, dtype=dtype).masked_fill_(hidden, float("-inf"))
            queries = q.view(1, tokens, HEADS, 1, HEAD_DIM).permute(2, 0, 1, 3, 4)

            def blocks(queries=queries, keys=keys, values=values, mask=mask, tokens=tokens, size=size) -> None:  # type: ignore[no-untyped-def]
                parts = []
                for first in range(0, tokens - size + 1, size):
                    end = first + size
                    block = (queries[:, :, first:end], keys[:, :, :end], values[:, :, :end])
                    parts.append(explicit_attention(*block, mask, HEAD_DIM**-0.5))
                torch.cat(parts, dim=2)

            flops = 4.0 * HEADS * HEAD_DIM * tokens * keys_of_prefill(tokens)
            yield f"prefill_attention_{name}_t{tokens}_flop_per_s", flops / clock.best_s(blocks, seconds=0.06, least=4)


# -- whole decode steps ------------------------------------------------------------------------------------------------


def _matrix(scheme: str, n: int, k: int, crossovers: Crossovers) -> Matrix:
    if scheme == "int8":
        return Int8Matrix(torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) + 0.1, crossovers=crossovers)
    return FloatMatrix(torch.randn(n, k).to(DTYPES[scheme]))


class DecodeStep:
    """One step of ``n_requests`` decoding requests of a small model, over and over; keys grow by one a step, as they do."""

    def __init__(self, scheme: str, n_layers: int, n_requests: int, context: int, crossovers: Crossovers) -> None:
        self.dtype = DTYPES["fp32" if scheme == "fp32" else "bf16"]
        self.crossovers = crossovers
        shapes = {p.name: (p.n, p.k) for p in block_products(SPEC)}
        self.layers = [{name: _matrix(scheme, *shape, crossovers) for name, shape in shapes.items()} for _ in range(n_layers)]
        self.table = torch.randn(SPEC.vocab_size, WIDTH).to(self.dtype)
        self.head = FloatMatrix(self.table)
        self.norm = torch.ones(WIDTH, dtype=self.dtype)
        most = context + 512
        n_pages = n_requests * (most // PAGE + 1)
        self.pool = torch.zeros(n_layers, 2 * HEADS, n_pages * PAGE, HEAD_DIM, dtype=self.dtype)
        self.frequencies = torch.rand(HEAD_DIM // 2)
        self.scheduler = Scheduler(SchedulerConfig(n_requests * most, n_requests, PAGE, n_pages, most))
        for i in range(n_requests):
            prompt = [1 + i, *range(1, context)]  # all different, or their pages would be shared
            self.scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=500, ignore_eos=True)))
        first = self.scheduler.schedule()  # the prompts, whose keys may be anything
        self.scheduler.update(first, [1] * n_requests)

    @torch.inference_mode()
    def __call__(self) -> None:
        step = self.scheduler.schedule()
        requests, positions = step.requests, np.array(step.starts)
        n = len(requests)
        tokens, places = torch.tensor([r.tokens[-1] for r in requests]), torch.from_numpy(positions)
        widest = int(positions.max()) // PAGE + 1
        table = np.array([r.pages[:widest] for r in requests])
        slots = torch.from_numpy(table[np.arange(n), positions // PAGE] * PAGE + positions % PAGE)
        angles = places[:, None, None].float() * self.frequencies
        turn = torch.complex(angles.cos(), angles.sin())
        pages = torch.from_numpy(table.reshape(-1)) if n > 1 else None
        mask = None
        if n > 1:
            hidden = np.arange(widest * PAGE) > positions[:, None]
            mask = torch.zeros(n, 1, widest * PAGE, dtype=self.dtype).masked_fill_(
                torch.from_numpy(hidden)[:, None], float("-inf")
            )
        x = F.embedding(tokens, self.table)
        for i, matrices in enumerate(self.layers):
            qkv = matrices["qkv"](F.rms_norm(x, self.norm.shape, self.norm, 1e-5)).view(n, -1, HEAD_DIM)
            _turn_and_store(qkv, turn, self.pool[i], slots)
            x = matrices["out"](self._attend(qkv, i, pages, mask, int(positions[0]) + 1), x)
            gate, up = matrices["gate_up"](F.rms_norm(x, self.norm.shape, self.norm, 1e-5)).chunk(2, dim=-1)
            x = matrices["down"](F.silu(gate).mul_(up), x)
        logits = self.head(F.rms_norm(x, self.norm.shape, self.norm, 1e-5)).float()
        self.scheduler.update(step, self._draw(logits))

    def _attend(self, qkv: Tensor, layer: int, pages: Tensor | None, mask: Tensor | None, keys: int) -> Tensor:
        n = qkv.shape[0]
        if pages is None:
            k, v = (half[:, None].narrow(2, 0, keys) for half in self.pool[layer].split(HEADS))
        else:
            paged = self.pool[layer].view(2 * HEADS, -1, PAGE * HEAD_DIM)
            k, v = paged.index_select(1, pages).view(2, HEADS, n, -1, HEAD_DIM)
        q = qkv[:, :HEADS].view(n, 1, HEADS, 1, HEAD_DIM).permute(2, 0, 1, 3, 4)
        mixed = attention(q, k, v, mask, HEAD_DIM**-0.5, self.crossovers)
        return mixed.permute(1, 2, 0, 3, 4).reshape(n, -1)

    def _draw(self, logits: Tensor) -> list[int | None]:
        logits.max(dim=1)[0].tolist()
        scaled = logits - logits.amax(dim=1, keepdim=True)
        scaled /= torch.full((len(logits), 1), 0.8)
        cumulative = torch.softmax(scaled, dim=1).cumsum(dim=1, dtype=torch.float64)
        total = cumulative[:, -1:]
        target = torch.minimum(0.5 * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen: list[int | None] = torch.searchsorted(cumulative, target, right=True).flatten().tolist()
        return chosen


MANY = 8
"""Requests of a step that stands for many."""


def measure_decode_steps(
    clock: Clock, schemes: Sequence[str], crossovers: Crossovers, short: int = 64, long: int = 512
) -> Iterator[tuple[str, float]]:
    """Seconds of ``decode_<one|many>_<scheme>_…``: a step outside its layers and a layer without keys, products included as
    they are; and (KV head, key) pairs per second of its attention."""
    for scheme in schemes:
        for name, n_requests in (("one", 1), ("many", MANY)):
            times = []
            for n_layers, context in ((2, short), (LAYERS, short), (LAYERS, long)):
                step = DecodeStep(scheme, n_layers, n_requests, context, crossovers)
                times.append(clock.best_s(step, seconds=0.08, least=6))
            base, deeper, longer = times
            layer_s = max((deeper - base) / (LAYERS - 2), LEAST_FIXED_S)
            longer_s = layer_s + max(longer - deeper, 0.0) / LAYERS
            pairs = float(HEADS * n_requests)
            fixed_s, pairs_per_s = fixed_and_rate(pairs * short, pairs * long, layer_s, longer_s)
            prefix = f"decode_{name}_{scheme}"
            yield f"{prefix}_step_s", max(base - 2 * layer_s, LEAST_FIXED_S)
            yield f"{prefix}_layer_s", fixed_s
            yield f"{prefix}_key_per_s", pairs_per_s


def without_products(profile: MachineProfile) -> dict[str, float]:
    """``profile.extras`` with the arithmetic and the bytes of products and small operations taken off every
    ``decode_…_layer_s``, and the head's off every ``…_step_s``, at the profile's own rates: what is left is the start of
    operators, which a wider model pays alike. At least ``LEAST_START_SHARE`` is left."""
    hardware = hardware_from_profile(profile)
    extras = dict(profile.extras)
    for scheme in DECODE_SCHEMES:
        for name, n_requests in (("one", 1), ("many", MANY)):
            layer, step = f"decode_{name}_{scheme}_layer_s", f"decode_{name}_{scheme}_step_s"
            if layer not in extras:
                continue
            shape = ServingShape(scheme=scheme, batch=n_requests, prompt_tokens=64, output_tokens=1)
            working_set = weights_bytes(SPEC, scheme)
            inside = [
                *layer_products(SPEC, shape, n_requests, working_set, hardware),
                *layer_operations(SPEC, shape, n_requests, hardware),
            ]
            around = around_layers(SPEC, shape, n_requests, n_requests, working_set, hardware)
            extras[layer] = _left(extras[layer], sum(w.seconds for w in inside))
            extras[step] = _left(extras[step], sum(w.seconds - w.launch_s for w in around))
    return extras


def _left(whole_s: float, known_s: float) -> float:
    return max(whole_s - known_s, LEAST_START_SHARE * whole_s)
