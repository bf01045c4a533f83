"""Counts what a step must read and compute, so that every run can say how near it came to the machine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.core.matrices import head_matrix, pair_flops
from twostroke.core.spec import ModelSpec
from twostroke.planner.work.flops import last_block_elements, row_flop, visible_pairs


class StepMeter:
    """Bytes and FLOP of one step. ``weights_bytes`` is what the packed matrices and norms take that a step reads
    (``Plan.step_bytes``). ``kv_token_bytes`` is what the cache takes for one token in all layers, scales included."""

    def __init__(self, spec: ModelSpec, weights_bytes: int, kv_token_bytes: int) -> None:
        self.weights_bytes = weights_bytes
        self.layer_token_bytes = kv_token_bytes // spec.n_layers
        windows = [spec.window_of_layer(i) for i in range(spec.n_layers)]
        self.n_full = windows.count(None)
        self.window = spec.sliding_window or 0
        self.n_windowed = spec.n_layers - self.n_full
        self.attention_flop = pair_flops(spec)
        self.row_flop = row_flop(spec)
        self.sampled_flop = 2 * (last_block_elements(spec) + head_matrix(spec).weights)

    def bytes_read(self, starts: Sequence[int], counts: Sequence[int]) -> int:
        """Bytes of the weights, read once, and of the keys and values that each request attends to, the new ones included."""
        keys = self.n_full * (sum(starts) + sum(counts))
        if self.n_windowed:
            keys += self.n_windowed * sum(min(s + n, self.window + n - 1) for s, n in zip(starts, counts, strict=True))
        return self.weights_bytes + keys * self.layer_token_bytes

    def flop(self, starts: Sequence[int], counts: Sequence[int], n_sampled: int) -> int:
        """2 for each multiply-add of a product, and 4·H·D for attention of each (query, visible key) pair in each layer."""
        pairs = self.n_full * sum(n * s + n * (n + 1) // 2 for s, n in zip(starts, counts, strict=True))
        if self.n_windowed:
            pairs += self.n_windowed * sum(visible_pairs(s, n, self.window) for s, n in zip(starts, counts, strict=True))
        return sum(counts) * self.row_flop + n_sampled * self.sampled_flop + pairs * self.attention_flop


@dataclass
class EngineStats:
    """Counts since the start, and the present state. A step is *decode* if each of its requests had one token to compute,
    *prefill* if none was decoding, else *mixed*. ``…_s`` is the time of whole steps, from scheduling to tokens."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0  # found in memory or loaded
    disk_hit_tokens: int = 0  # loaded from the disk tier, of preempted requests too
    disk_load_s: float = 0.0
    disk_loads_refused: int = 0  # admissions for which computing was predicted to be faster
    disk_pages: int = 0  # held now
    disk_pages_written: int = 0
    disk_pages_damaged: int = 0
    disk_requests_dropped: int = 0  # whose pages were not written, because too many waited
    output_tokens: int = 0
    draft_tokens: int = 0  # that steps checked
    accepted_draft_tokens: int = 0  # those of them that were right
    exit_rows: int = 0  # that might leave before the last layer
    exit_row_layers: int = 0  # that these passed
    exits: dict[int, int] = field(default_factory=dict)  # them by the number of layers that they passed; empty without exits
    failed_requests: int = 0
    prefill_steps: int = 0
    prefill_s: float = 0.0
    prefill_tokens: int = 0  # computed in prefill steps, prefix hits not counted
    prefill_bytes: int = 0  # weights and cache that prefill steps had to read
    prefill_flop: int = 0
    mixed_steps: int = 0
    mixed_s: float = 0.0
    mixed_tokens: int = 0
    mixed_bytes: int = 0
    mixed_flop: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0  # wrong drafts not counted
    decode_requests: int = 0  # that decoded, summed over decode steps
    decode_bytes: int = 0
    decode_flop: int = 0
    adapters: int = 0  # that requests may name
    adapters_held: int = 0  # in memory
    adapter_bytes: int = 0
    adapter_loads: int = 0
    adapter_load_s: float = 0.0
    adapter_hits: int = 0  # admitted requests whose adapter was in memory
    adapter_evictions: int = 0  # adapters that made room for others
    weight_changes: int = 0  # weights that were replaced by others
    weight_pause_s: float = 0.0  # of the last one: the time in which no step was computed
    expert_load: float = 0.0  # largest load of an expert over its layer's mean, in the worst layer; 0 without experts
