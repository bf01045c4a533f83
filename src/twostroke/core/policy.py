"""What the two engines decide, without torch: the planner predicts a run by asking what the run itself asks.

A device is named by its kind, which torch spells "cpu" and "cuda" and the planner "cpu" and "gpu", a type by its name ("bf16").
What the engines can run at all is in ``core.engines``; which kernel is the faster one in ``core.crossovers``.
"""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.core.spec import ModelSpec

# -- training -------------------------------------------------------------------------------------------------------------

TOKENS_AT_ONCE = 2048
"""Tokens that training on a CPU takes through the model at once: a micro-batch of more is computed in parts."""


def rows_at_once(device_kind: str, has_fp32_gradients: bool, batch_size: int, sequence_length: int) -> int:
    """Rows of a micro-batch that one forward and backward pass takes.

    On a CPU the largest divisor of the micro-batch within ``TOKENS_AT_ONCE`` tokens: what blocks hand to each other then stays
    in cache and in memory that the allocator reuses, and only the activations of a part are kept. Measured with 12.2M
    parameters, 16 × 512 tokens and two cores: the step's products run at 903 GFLOP/s instead of 826, and the sums of gradients
    take 13 ms more. All rows on a GPU, where launching more kernels costs more than it saves, and where gradients are summed in
    bf16, which would lose small ones.
    """
    if device_kind != "cpu" or not has_fp32_gradients:
        return batch_size
    most = max(1, TOKENS_AT_ONCE // sequence_length)
    return max(rows for rows in range(1, min(most, batch_size) + 1) if batch_size % rows == 0)


BF16_FEATURES = ("avx512f", "bf16")
"""Features of processors on which torch's products of bf16 are fast: AVX-512, by which oneDNN widens them where there are no
instructions for bf16 itself, and Arm's bf16. Elsewhere they are plain loops: 512³ ran at 1.3 GFLOP/s on two cores with AVX2
alone (Zen 3), and at 139 in fp32."""


def multiplies_bf16(device_kind: str, features: Iterable[str]) -> bool:
    """Whether torch multiplies bf16 fast there. ``features`` are a processor's (``core.profile.Fingerprint.isa``)."""
    return device_kind != "cpu" or any(name in BF16_FEATURES for name in features)


def computed_type(dtype: str, multiplies: bool) -> str:
    """The training type that ``dtype`` is computed as where bf16 is multiplied fast or not: mixed bf16 becomes fp32, whose
    masters and update are the same. What a user can only have meant, pure bf16 and fp16, stays."""
    return "fp32" if dtype == "bf16" and not multiplies else dtype


def layers_of(chunk: int, n_chunks: int, n_layers: int) -> range:
    """The layers of ``chunk``. What ``n_chunks`` do not divide goes to the first ones, because the last has the head."""
    each, more = divmod(n_layers, n_chunks)
    first = chunk * each + min(chunk, more)
    return range(first, first + each + (chunk < more))


BUCKET_BYTES = 4 * 2**20
"""Gradients that ranks exchange at once: tensors follow one another until they are as many bytes."""

BURST_WINDOWS_MS = (5, 50)
"""Windows of which the one that a rank sends most in is measured and planned."""

OFFLOAD_BLOCK = 2**21
"""Parameters that are updated at once when the optimizer's state is on disk: 16 MiB of AdamW's moments, of which a block is
updated while the one before is written and the next is read. A multiple of the pieces that updates are rounded in."""

LEAST_OFFLOADED_BYTES = 2**16
"""Activations that take fewer bytes stay in memory: all of them together are little, and each would be a system call."""

LOSS_CHUNK_ROWS = 1024
"""Rows of logits that the loss holds at once. 8192 rows, V = 4096, E = 256, bf16, compiled, forward and backward, CPU time of
one thread on an EPYC with AVX-512-BF16: 149 ms in chunks of 256, 145 of 512, 150 of 1024, 146 of 2048, 160 of 4096, 162 whole,
and 161 for compiled ``F.cross_entropy`` of all logits: chunks cost nothing. Eager: 312 against 334."""


def loss_chunk_rows(n_rows: int, preferred: int = LOSS_CHUNK_ROWS) -> int:
    """Rows per chunk of the loss near ``preferred`` that divide ``n_rows`` where one within a factor of two does.

    Equal chunks have one shape, so a compiled chunk is compiled once.
    """
    if n_rows <= preferred:
        return n_rows
    for rows in range(preferred, preferred // 2, -1):
        if n_rows % rows == 0:
            return rows
    return preferred


EXPLICIT_ATTENTION_TOKENS = 2048
"""Longest sequence for explicit attention: its probabilities, B·H·T²/2 elements a layer, are kept for the backward pass."""


def is_beyond_sdpa(spec: ModelSpec) -> bool:
    """Whether scores are bounded or have sinks beside them, which torch's fused attention does not compute. Explicit attention
    is taken then, in every type and at every length, where the native library's is not."""
    return spec.departures.attention_cap is not None or spec.departures.attention_sinks


LEAST_QUERY_BLOCK, MOST_QUERY_BLOCKS = 128, 4
"""Explicit attention walks up to four blocks of queries, of at least 128: four skip 3/8 of the products of a causal square,
more of them gain nothing measurable and cost seconds of compilation."""


def attends_explicitly(device_kind: str, dtype: str, n_tokens: int) -> bool:
    """Whether training attends by two batched products and a softmax, which keep probabilities, instead of by SDPA.

    SDPA's flash kernel for CPUs multiplies bf16 no faster than fp32 where there is AVX-512-BF16 but no AMX, and its backward
    never does. Measured on such a machine (one thread, H=6, D=64, milliseconds of forward and backward), at B=4, T=512: flash
    19.4 and 35.3, explicit and compiled 8.1 and 11.1; a whole compiled block 44.5 and 86.9 against 31.1 and 65.3; at B=1,
    T=2048 97.8 and 158 against 47.7 and 85.4. In fp32 the gain is a tenth, not worth the memory. Scores are rounded to bf16,
    which training bears; scoring keeps SDPA's fp32 scores.
    """
    return device_kind == "cpu" and dtype == "bf16" and n_tokens <= EXPLICIT_ATTENTION_TOKENS


def query_blocks(n_tokens: int) -> list[tuple[int, int]]:
    """(start, end) of the blocks of max(128, ⌈T/4⌉) queries that explicit attention walks; each sees keys up to its end."""
    step = max(LEAST_QUERY_BLOCK, -(-n_tokens // MOST_QUERY_BLOCKS))
    return [(start, min(start + step, n_tokens)) for start in range(0, n_tokens, step)]


NATIVE_HEAD_MULTIPLE = 32
"""What the head dimension must be a multiple of for the native library's attention: half of it, turned, is whole vectors of
16."""


def fits_native_attention(device_kind: str, dtype: str, spec: ModelSpec) -> bool:
    """Whether the native library's attention, where it was built, does what training of ``spec`` asks. It is taken then.

    A whole step of 12.2M parameters (6 × 384, 16 × 512 packed tokens) took 0.93 s of two processors' time with explicit
    attention and 0.83 with the native one, which keeps no probabilities either. It bounds scores and has sinks.
    """
    computed = spec.head_dim % NATIVE_HEAD_MULTIPLE == 0 and spec.dropout == 0 and spec.mla is None
    return device_kind == "cpu" and dtype == "bf16" and computed


FLASH_HEAD_MULTIPLE, FLASH_MOST_HEAD_DIM = 8, 256
"""What torch's flash kernel for sequences of various lengths takes of head dimensions."""


def fits_flash_attention(device_kind: str, dtype: str, spec: ModelSpec) -> bool:
    """Whether torch's flash kernel on a GPU computes the attention of ``spec`` over packed documents. It is taken then, because
    under a mask torch takes a kernel that computes both halves of the square and reads the mask as well."""
    computed = spec.head_dim % FLASH_HEAD_MULTIPLE == 0 and spec.head_dim <= FLASH_MOST_HEAD_DIM and spec.dropout == 0
    on_gpu = device_kind in ("cuda", "gpu") and dtype in ("bf16", "fp16")
    return on_gpu and computed and spec.mla is None and not is_beyond_sdpa(spec)


LEAST_EXPERT_ROWS = 16
"""Rows of an expert's product at least: fewer are not computed faster, because a register block has as many."""


def expert_rows(n_rows: int) -> int:
    """Rows that training computes of an expert that ``n_rows`` chose, at most an eighth more beyond ``LEAST_EXPERT_ROWS``·8.

    A library that compiles a product for each number of rows then compiles eight for every doubling. A step that had to compile
    nearly all took 6.1 s instead of 0.5.
    """
    step = max(LEAST_EXPERT_ROWS, 1 << max(0, n_rows.bit_length() - 4))
    return -(-n_rows // step) * step


def numbers_of_expert_rows(most: int) -> int:
    """Different values of ``expert_rows`` for 1 to ``most`` rows."""
    rows = n = 0
    while rows < most:
        rows, n = expert_rows(rows + 1), n + 1
    return n


NEWTON_SCHULZ_STEPS = 5
"""Iterations by which Muon orthogonalises a matrix (Jordan 2024), torch's default too."""

NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256
"""Weights that share one NF4 scale by default, and scales that share one of their own under double quantisation (QLoRA, arXiv
2305.14314, section 3)."""

# -- inference ------------------------------------------------------------------------------------------------------------

TOKEN_BUDGET = 512
"""Tokens computed in one step by default: a longer prompt is prefilled in several."""

BEHIND_TOKENS = 32
"""Tokens of a step for prompts of a priority above 0. Another request may come while the step runs, and waits for its end."""

BESIDE_TOKENS = 16
"""The same of a step in which a request before them decodes: its next token waits for the step."""

QUIET_STEPS = 1000
"""Steps after the last with a request of priority 0, up to which another is expected: some ten seconds of a small model."""

STEP_RATIO = 2.0
"""Times what a step takes without prompts that it may take with them, where requests decode: of the gaps between tokens the
99th percentile is then about twice the median where few steps hold prompts, and less where most do (decision 134)."""

MAX_RUNNING = 128
"""Requests that run at once by default."""

MAX_ADAPTERS = 256
"""Adapters that requests may name at once."""

MAX_ADAPTER_RANK = 512
"""Largest rank of a served adapter."""

ADAPTER_MEMORY_BYTES = 2 * 2**30
"""Memory of adapters by default: two hundred of rank 16 beside every matrix of a model of 135M parameters."""

KV_DIR_BYTES = 10 * 2**30
"""Largest file of cached prefixes by default: half a million tokens of a model of 1.1B parameters."""

HANDOVER_TOKENS = 128
"""Prompt tokens that an engine computes itself even if others prefill for it: a step with so few beside its decoding requests
is hardly longer, and asking takes a round trip and a step of the other engine."""

HANDOVER_BYTES = 2**29
"""Memory of pages that another engine has computed and that wait to be loaded. Further prompts wait to be asked for."""

MOST_THREADS = 256
"""Threads that the engine may be told to use: the native library's pool has places for so many (``Pool::kMaxThreads``), and
OpenMP crashes where the system refuses it a thread."""

MAX_KL_NATS = 0.02
"""KL(exact ‖ rounded) a token above which `twostroke quantize` holds matrices in int8, and `twostroke serve` takes a type only
where it is asked for: two thirds of the 3% of perplexity that int4 may cost."""

DRAFT_ROWS = 64
"""Drafted tokens that one step checks at most, where it checks any. Each needs a row of logits, and with so many rows more a
step is as slow as several."""

PAGE_TOKENS = 16
"""Tokens of one page of the KV cache by default; a request's last page is counted whole."""

CACHE_SHARE = 0.25
"""Share of the memory that is free after the weights were loaded which the KV cache may take by default."""


MAX_PAGES = 2**18
"""Pages of a cache at most, four million tokens: a page takes 100 bytes of bookkeeping beside its own, which a narrow model
whose config.json tells of a billion positions made tens of gigabytes."""


def default_pages(
    page_bytes: float,
    available_bytes: float,
    longest_tokens: int,
    max_running: int = MAX_RUNNING,
    page_tokens: int = PAGE_TOKENS,
) -> int:
    """Pages of the cache where nobody says how many: for ``max_running`` requests of the longest context, as far as
    ``available_bytes`` hold them, at least one."""
    wanted = max_running * -(-longest_tokens // page_tokens)
    return max(1, min(wanted, int(available_bytes // page_bytes)))


LEAST_KEPT_PACKED_BYTES = 32 * 2**20
"""A smaller model is packed so fast at every start that a file of its packed weights is not worth it."""

LOGITS_AT_ONCE = 2**25
"""Logits that exist at once while tokens are scored: 128 MiB of fp32, and as much again for their logarithms."""

SCORED_TOKENS_PER_PASS = 8192
"""Tokens of a pass of the decoder that scores."""

STREAMED_BYTES = 2**28
"""Residual streams, in fp32, that go together through a model whose blocks are read one after another."""


def streamed_tokens(d_model: int) -> int:
    """Tokens for which each block of such a model is read once: 16,384 of them at a width of 4096, with 32,768 FLOP for each
    weight that is read."""
    return max(1, STREAMED_BYTES // (4 * d_model))


def scored_rows(vocab_size: int, token_budget: int = TOKEN_BUDGET) -> int:
    """Rows of a step that scores: each may have logits, which limit them to 220 at a vocabulary of 152,000."""
    return max(1, min(token_budget, LOGITS_AT_ONCE // vocab_size))


PREFILL_QUERIES = 128
"""Query tokens that the torch runner's attention takes at once: a causal chunk in blocks skips the keys after each block's
end."""

WEIGHT_ONLY_MULTIPLE = 32
"""What the inputs of an int8 matrix must be a multiple of for torch's product of int8 weights alone: ``_weight_int8pack_mm``
reads beyond the end, without a word, where they are not (torch 2.13)."""


def logits_bytes(vocab_size: int, n_rows: int) -> int:
    """Bytes of a step's fp32 logits: one row of the vocabulary for each token that is sampled or scored."""
    return 4 * vocab_size * n_rows
