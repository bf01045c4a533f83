"""What a step must read and compute, so that every run can say how near it came to the machine's limits."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.spec import ModelSpec


class StepMeter:
    """Bytes and FLOP of one step, from the spec, the bytes of weights a step reads and those of one cached token."""

    def __init__(self, spec: ModelSpec, weights_bytes: int, kv_token_bytes: int) -> None:
        self.weights_bytes = weights_bytes
        self.layer_token_bytes = kv_token_bytes // spec.n_layers
        windows = [spec.window_of_layer(i) for i in range(spec.n_layers)]
        self.n_full = windows.count(None)
        self.window = spec.sliding_window or 0
        self.n_windowed = spec.n_layers - self.n_full
        self.attention_flop = 4 * spec.n_heads * spec.head_dim
        wide = (2 if spec.mlp == "swiglu" else 1) * spec.d_ff
        qkv = spec.qkv_rows * spec.d_model
        rest = spec.n_heads * spec.head_dim * spec.d_model + (wide + spec.d_ff) * spec.d_model
        # After the last attention only the rows that a token is sampled from go on.
        self.row_flop = 2 * (spec.n_layers * qkv + (spec.n_layers - 1) * rest)
        self.sampled_flop = 2 * (rest + spec.vocab_size * spec.d_model)

    def bytes_read(self, starts: Sequence[int], counts: Sequence[int]) -> int:
        """Weights once, and for each request the keys and values it attends to, itself included."""
        keys = self.n_full * (sum(starts) + sum(counts))
        if self.n_windowed:
            keys += self.n_windowed * sum(min(s + n, self.window + n - 1) for s, n in zip(starts, counts, strict=True))
        return self.weights_bytes + keys * self.layer_token_bytes

    def flop(self, starts: Sequence[int], counts: Sequence[int], n_sampled: int) -> int:
        """2 a multiply-add of every product that is computed; attention 4·H·D for each (query, visible key) pair and layer."""
        pairs = self.n_full * sum(n * s + n * (n + 1) // 2 for s, n in zip(starts, counts, strict=True))
        if self.n_windowed:
            pairs += self.n_windowed * sum(
                min(s + i, self.window) for s, n in zip(starts, counts, strict=True) for i in range(1, n + 1)
            )
        return sum(counts) * self.row_flop + n_sampled * self.sampled_flop + pairs * self.attention_flop
