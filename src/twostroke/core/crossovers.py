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

    ``one_thread_max_flop``, ``one_thread_max_bytes``: an engine step below both runs on one thread, because waiting for one
    another in a hundred small operations costs two threads what they gain. Times as fast on two cores of a Zen 3 (AVX2) as on
    one, bf16 (`twostroke calibrate` measures this machine's)::

        model, rows     1.8M, 1  1.8M, 2  1.8M, 8  8M, 1    8M, 8    45M, 1    45M, 8
        MFLOP           1.2      2.5      10       11       85       67        538
                        1.08     1.34     1.54     1.39     1.76     1.45      1.86

    ``server_row_flop``: in a server the limits are higher by so much for each request that decodes, because HTTP and its client
    want a core for each token. Output tokens a second of users over HTTP on the same cores, one against two threads::

        model           MFLOP a row    1 user         4              8              16
        1.4M            2.4            3,430 2,850    6,700 5,400    7,980 6,690    8,990 7,970
        8M              10.6           1,240 1,510    1,860 2,540    1,920 2,680    1,940 2,820
    """

    int8_weight_only_max_macs: float = 3e6
    flash_max_scores: float = 800.0
    one_thread_max_flop: float = 1e7
    one_thread_max_bytes: float = 8e7
    server_row_flop: float = 1e7

    def takes_one_thread(self, weights_bytes: float, flop: float, n_served: float) -> bool:
        """Whether an engine step that reads ``weights_bytes`` and computes ``flop`` in its blocks runs on one thread.
        ``n_served``: requests that decode in it for clients of a server. A weight in bf16 is two bytes and two FLOP a row."""
        more = n_served * self.server_row_flop
        return weights_bytes <= self.one_thread_max_bytes + more and flop <= self.one_thread_max_flop + more

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ConfigError(f"crossover {name}={value} must be at least 0. Run `twostroke calibrate`.")
