"""Where one kernel becomes faster than another. Measured defaults; a machine profile holds its own."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.errors import ConfigError


@dataclass(frozen=True)
class Crossovers:
    """Defaults measured with one thread of a 2.6 GHz EPYC 9005 (AVX-512-VNNI and -BF16, no AMX), best of 300, microseconds.

    ``int8_weight_only_max_macs``: an int8 product of at most this many multiply-adds (rows·N·K) runs on int8 weights and bf16
    activations, a larger one quantises its activations too (W8A8). Weight-only against W8A8 with quantising the rows::

        N×K         576×576   1024×256  1536×576  4096×384   2048×2048   4096×4096
        1 row       9  33      9  32    23   43    48  69     229  206    925  420
        4 rows     18  36     20  34    46   47   139  76     255  192    978  470
        8 rows     35  40     37  37    89   59   267  99     473  237   2122  642
        16 rows    68  50     72  44   185   84   449 135     884  331   3709  935

    ``flash_max_scores``: bf16 attention of one query token with at most this many (request, KV head, key) triples runs in
    torch's flash kernel, which starts faster; a larger one in two batched products and a softmax. Flash against products::

        requests × KV heads × keys    1×2×128  14 28    1×2×1024  62 43    8×2×256  131 61    32×2×256  542 175

    Rounding the scores to bf16, as products do, costs no perplexity: stories260K, 13 thousand tokens, ratio to fp32 1.00035 so
    and 1.00038 in the flash kernel.

    ``one_thread_max_flop``, ``one_thread_max_bytes``: a server's engine step below both runs on one thread, because waiting
    for one another in a hundred small operations costs two threads what they gain, and far more where others use the cores, as
    HTTP and its clients do. Step time on two cores, one against two threads, milliseconds (`twostroke calibrate` measures this
    machine's)::

        model, rows     6M, 1        6M, 4        6M, 16       6M, 32       12M, 1       135M, 1
        quiet           1.28 1.25    1.98 1.98    2.43 1.82    3.83 1.78    2.10 2.39    13.9 13.0
        others busy     1.17 1.84    1.85 2.66                              2.26 3.30

    ``alone_max_flop``, ``alone_max_bytes``: the same of an engine that no server surrounds. Times as fast on two cores of a
    Zen 3 (AVX2) as on one, bf16::

        model, rows     1M, 1    1M, 2    1M, 8    7M, 1    7M, 8    45M, 1    45M, 8
        MFLOP           1.2      2.5      10       11       85       67        538
                        1.08     1.34     1.54     1.39     1.76     1.45      1.86
    """

    int8_weight_only_max_macs: float = 3e6
    flash_max_scores: float = 800.0
    one_thread_max_flop: float = 1e8
    one_thread_max_bytes: float = 8e7
    alone_max_flop: float = 1e7
    alone_max_bytes: float = 8e7

    def takes_one_thread(self, weights_bytes: float, flop: float, in_server: bool) -> bool:
        """Whether an engine step that reads ``weights_bytes`` and computes ``flop`` in its blocks runs on one thread."""
        if in_server:
            return weights_bytes <= self.one_thread_max_bytes and flop <= self.one_thread_max_flop
        return weights_bytes <= self.alone_max_bytes and flop <= self.alone_max_flop

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ConfigError(f"crossover {name}={value} must be at least 0. Run `twostroke calibrate`.")
