"""Sections of a machine profile: what calibration writes and a planner's formula reads, by what is measured together.

None, an empty tuple and an empty table say that nothing was measured; the formula then names what it assumes instead. A section
whose fields have other defaults states them here, for datasheets and profiles alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from twostroke.core.crossovers import Crossovers

Engine = Literal["train", "serve"]
Mode = Literal["eager", "compiled"]
Direction = Literal["forward", "backward"]
Phase = Literal["prefill", "decode"]

ASSUMED_IMPORT_S = 2.0
"""Importing torch, where it was not measured."""

PAGE_BYTES = 4096
"""Of memory that the system hands out and clears at its first touch."""


@dataclass(frozen=True)
class Process:
    """A Python process before it does anything: importing torch, a start of training with its imports, importing the inference
    engine, both with torch, and resident bytes after a first product; and a thread's first touch of a page of ``PAGE_BYTES``.
    Profiles from before something was measured have None."""

    torch_import_s: float = ASSUMED_IMPORT_S
    resident_bytes: float = 0.0
    train_import_s: float | None = None
    serve_import_s: float | None = None
    page_fault_s: float | None = None

    def import_s(self, engine: Engine) -> float:
        """Of ``engine`` and torch."""
        measured_s = self.train_import_s if engine == "train" else self.serve_import_s
        return self.torch_import_s if measured_s is None else measured_s


@dataclass(frozen=True)
class Ring:
    """Collectives between ``ranks`` processes: the start of a message and the rate of a ring (``calibration.collectives``)."""

    alpha_s: float
    bytes_per_s: float
    ranks: int


@dataclass(frozen=True)
class Conditions:
    """How a calibration went: the share of its measurements that found no quiet moment, the share by which the rates that an
    engine's plans need may read low, how long it took, and how many processors other programs used meanwhile."""

    disturbed_share: float = 0.0
    low_by_share: dict[str, float] = field(default_factory=dict)
    calibration_s: float | None = None
    others_used: float = 0.0

    @property
    def most_low_by_share(self) -> float:
        return max(self.low_by_share.values(), default=0.0)


# -- training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockRates:
    """One transformer block by itself: FLOP/s of its attention over the keys that the kernel walks, bytes/s of its elementwise
    work, and elements of q and k that QK-norm passes a second."""

    dtype: str
    mode: Mode
    direction: Direction
    attention_flop_per_s: float
    elementwise_bytes_per_s: float
    head_norm_element_per_s: float | None = None


@dataclass(frozen=True)
class TrainingStep:
    """A whole step of an anchor (``planner.training.anchors``), medians by part; ``peak_bytes`` of a process of its own, and
    ``compiled_start_s`` that one takes until its first step, beyond importing torch, if its graphs lie in the compiler's
    cache."""

    width: int
    n_layers: int
    dtype: str
    mode: Mode
    forward_s: float
    backward_s: float
    optimizer_s: float
    first_step_s: float
    peak_bytes: float | None = None
    method: str = "full"
    compiled_start_s: float | None = None

    def direction_s(self, direction: str) -> float:
        return self.forward_s if direction == "forward" else self.backward_s

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class TrainingRates:
    """What training runs beside plain products. ``cross_entropy_logit_per_s`` and ``nf4_weight_per_s``, the weights that QLoRA
    decodes, are by mode; ``setup_…`` is what surrounds the blocks, ``muon_element_per_s`` and ``muon_matrix_s`` what Muon takes
    beyond its products, ``rounded_…`` an update of pure bf16, which rounds stochastically; ``block_compile_s`` compiles one
    block both ways, ``adapter_compile_s`` one with adapters, and ``compiler_start_s`` is what a new process adds to that.
    ``adapter_forward_s``, ``…_backward_s`` and ``…_update_s`` are what one adapter takes beyond its products."""

    attends_natively: bool = False
    blocks: tuple[BlockRates, ...] = ()
    steps: tuple[TrainingStep, ...] = ()
    block_compile_s: float | None = None
    cross_entropy_logit_per_s: dict[str, float] = field(default_factory=dict)
    nf4_weight_per_s: dict[str, float] = field(default_factory=dict)
    setup_forward_bytes_per_s: float | None = None
    setup_backward_bytes_per_s: float | None = None
    mask_element_per_s: float | None = None
    adamw_bytes_per_s: float | None = None
    muon_element_per_s: float | None = None
    muon_matrix_s: float = 0.0
    rounded_element_per_s: float | None = None
    rounded_matrix_s: float = 0.0
    compiler_start_s: float | None = None
    adapter_forward_s: float | None = None
    adapter_backward_s: float | None = None
    adapter_update_s: float | None = None
    adapter_compile_s: float | None = None

    def compiled_start_s(self, method: str) -> float | None:
        """Seconds of a new process until its first step, whose graphs lie in the compiler's cache, beyond importing torch; None
        if that was not measured."""
        kinds = ("full",) if method == "full" else ("lora", "full")
        found = [step.compiled_start_s for kind in kinds for step in self.steps if step.method == kind]
        return next((seconds for seconds in found if seconds is not None), None)

    def block(self, dtype: str, mode: str, direction: str) -> BlockRates | None:
        """What was measured of a block; of fp16, which is not, what bf16 takes beside its products."""
        wanted = ("bf16" if dtype == "fp16" else dtype, mode, direction)
        return next((b for b in self.blocks if (b.dtype, b.mode, b.direction) == wanted), None)

    def step(self, width: int, n_layers: int, dtype: str, mode: str, method: str = "full") -> TrainingStep | None:
        wanted = (width, n_layers, dtype, mode, method)
        return next((s for s in self.steps if (s.width, s.n_layers, s.dtype, s.mode, s.method) == wanted), None)


# -- serving --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NativeStep:
    """Seconds of a whole step of the native engine (``planner.hardware.anchors``): a prompt of ``rows`` tokens, or ``rows``
    requests that decode with ``context`` tokens each before them, where ``sharing`` query heads read one key head."""

    phase: Phase
    width: int
    n_layers: int
    rows: int
    context: int
    scheme: str
    seconds: float
    sharing: int = 2
    vocabulary: int = 8192
    cache: str = "bf16"


@dataclass(frozen=True)
class StepPrices:
    """Seconds of one unit of what a native step does beside its products, as fitted to whole steps; 0: the fit found none.
    ``barrier`` is a layer of a step on several threads, ``attention`` a FLOP of attention, ``key`` a number of the keys and
    values that a decode step walks, ``far_key`` what one more takes that comes from memory, ``logit`` one that a token is
    chosen from; threads share elements, FLOP and keys."""

    phase: Phase
    step_s: float = 0.0
    layer_s: float = 0.0
    barrier_s: float = 0.0
    element_s: float = 0.0
    attention_s: float = 0.0
    row_s: float = 0.0
    key_s: float = 0.0
    far_key_s: float = 0.0
    logit_s: float = 0.0


@dataclass(frozen=True)
class CachePrice:
    """Seconds that attention over a cache of ``dtype`` takes more than over one in bf16: of a FLOP in a prompt, of a number
    that is walked in a decode step, beside what more or fewer bytes from memory take. Negative where it is faster."""

    phase: Phase
    dtype: str
    more_s: float


@dataclass(frozen=True)
class NativePass:
    """Rate of one packed (m, k) × (k, n) product in passes over ``working_set_bytes`` of such matrices by ``n_threads``."""

    scheme: str
    n_threads: int
    working_set_bytes: float
    m: int
    n: int
    k: int
    flop_per_s: float


@dataclass(frozen=True)
class NativeRates:
    """The native engine beside the products of all threads over ``working_set_bytes`` of weights, which are among a profile's
    others. ``passes`` are products in cache, and those of one thread. ``crowding`` says how many times its own bytes a step's
    working set counts against the cache, which it shares with all that the engine and other programs touch meanwhile."""

    working_set_bytes: float
    steps: tuple[NativeStep, ...] = ()
    prices: tuple[StepPrices, ...] = ()
    caches: tuple[CachePrice, ...] = ()
    passes: tuple[NativePass, ...] = ()
    n_threads: int = 1
    crowding: float = 1.0


# -- beside the engines' steps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextRates:
    """Preparing text. Seconds a byte: reading it and looking for duplicates, training a tokenizer on it (and of that, for each
    entry of the vocabulary), tokenising and writing it."""

    read_byte_s: float
    train_byte_s: float
    merge_byte_s: float
    encode_byte_s: float


@dataclass(frozen=True)
class WeightRates:
    """Weights outside of steps, on all threads: elements/s that go to their nearest codes by written scheme, that are packed
    from bf16 by the library's product, and that are rounded with compensation; bytes/s of a copy into new memory.

    Of importing and exporting, elements/s by name (``calibration.format_rates``): decoded from what foreign files hold, rounded
    to what they are to hold, and by type looked at for what is not finite. A matrix of codes takes ``coded_call_s`` more."""

    rounded_per_s: dict[str, float] = field(default_factory=dict)
    packed_per_s: dict[str, float] = field(default_factory=dict)
    compensated_per_s: float | None = None
    copied_bytes_per_s: float | None = None
    decoded_per_s: dict[str, float] = field(default_factory=dict)
    encoded_per_s: dict[str, float] = field(default_factory=dict)
    checked_per_s: dict[str, float] = field(default_factory=dict)
    coded_call_s: float | None = None


@dataclass(frozen=True)
class SamplingRate:
    """What choosing tokens takes beyond taking the largest logit, if requests ask for ``kind``: a call, each of its rows, each
    logit of a row."""

    kind: str
    call_s: float
    row_s: float
    logit_s: float


@dataclass(frozen=True)
class FirstUses:
    """What a command takes the first time in a new process: the first prompt and the ``tokens`` after it beyond later ones, and
    quantising a model: at all, and each layer of small matrices."""

    prompt_s: float
    tokens_s: float
    tokens: int
    quantise_s: float
    quantise_layer_s: float


@dataclass(frozen=True)
class HttpRates:
    """What HTTP adds to the engine: seconds of a request before its first token where no other is under way, of a step, and of
    each answer in it. Each token of a prompt adds ``prompt_token_s``. Requests that come together are handled one after
    another, ``handling_s`` each and what their tokens add. A prompt takes ``idle_s`` longer if the engine had nothing to do
    before. A server of a tiny model is ready ``start_s`` after its command; None: not measured. A step on all threads takes
    longer itself, because HTTP runs on its processors: ``shared_step_s``, ``shared_answer_s`` for each answer in it, and
    ``shared_request_s`` for each request that is handled meanwhile. A first token comes ``shared_first_s`` later if its prompt
    is computed on all threads. At 90, 95 and 99% of the gaps a token comes later than most by ``late_shares`` of a step. Each
    token takes ``token_s`` of what handles requests, so that those of many users hold up requests and one another."""

    request_s: float
    step_s: float
    answer_s: float
    start_s: float | None = None
    handling_s: float = 0.0
    idle_s: float = 0.0
    shared_answer_s: float = 0.0
    shared_step_s: float = 0.0
    shared_request_s: float = 0.0
    prompt_token_s: float = 0.0
    shared_first_s: float = 0.0
    late_shares: tuple[float, ...] = (0.0, 0.0, 0.0)
    token_s: float = 0.0


@dataclass(frozen=True)
class Contended:
    """What calibration measured beside a program of its own that took one processor: training steps by mode ("compiled",
    "eager"; "adapters" compiled) as multiples of the same steps right before, first uses and HTTP. Steps of the inference
    engine take one thread fewer then, which was measured."""

    training: dict[str, float] = field(default_factory=dict)
    first_uses: FirstUses | None = None
    http: HttpRates | None = None


# -- what runs taught -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correction:
    """The factor on one quantity's time, from ``n_runs`` runs of ``n_configurations`` configurations. ``before_percent`` and
    ``after_percent`` are errors on the ``n_held_out`` newest runs, which the factor that was judged had not seen."""

    quantity: str
    factor: float
    n_runs: int
    n_configurations: int
    n_held_out: int
    before_percent: float
    after_percent: float


@dataclass(frozen=True)
class Corrections:
    """Factors that plans of this machine multiply times with, as `twostroke ledger fit` learned them from the machine's own
    runs of ``code_version`` (``planner.truth.learning``). Empty until then, and after every calibration."""

    learned: tuple[Correction, ...] = ()
    fitted_at: str = ""  # ISO 8601, UTC
    code_version: str = ""

    @property
    def factors(self) -> dict[str, float]:
        return {one.quantity: one.factor for one in self.learned}


@dataclass(frozen=True, eq=False, kw_only=True)
class Measurements:
    """The sections that a machine profile has and a plan reads; of a datasheet's device all are empty."""

    disk_cached_read_bytes_per_s: float | None = None  # of a file that was just written
    product_launches_s: dict[str, float] = field(default_factory=dict)  # by scheme: before a product's arithmetic begins
    process: Process = field(default_factory=Process)
    training: TrainingRates = field(default_factory=TrainingRates)
    native: NativeRates | None = None
    crossovers: Crossovers = field(default_factory=Crossovers)
    conditions: Conditions = field(default_factory=Conditions)
    corrections: Corrections = field(default_factory=Corrections)
    text: TextRates | None = None
    weights: WeightRates = field(default_factory=WeightRates)
    sampling: tuple[SamplingRate, ...] = ()
    first_uses: FirstUses | None = None
    http: HttpRates | None = None
    contended: Contended = field(default_factory=Contended)
