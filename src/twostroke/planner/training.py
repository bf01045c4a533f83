"""What a training run will take: memory by term, time by pass and component, throughput, storage, network, energy, money."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.planner.cost import Cost, cost_of
from twostroke.planner.flops import attention_flops_per_token, mfu, training_flops_per_token
from twostroke.planner.hardware import DATASHEET_NOTE, Hardware
from twostroke.planner.latency import (
    block_rate,
    elementwise_elements,
    elementwise_flops,
    head_norm_rate,
    setup_bytes,
    training_attention_rate,
)
from twostroke.planner.memory import (
    activation_bytes,
    checkpoint_bytes,
    gradients_bytes,
    keys_walked,
    loss_bytes,
    model_bytes,
    optimizer_bytes,
    training_weights_bytes,
)
from twostroke.planner.params import Parameters, Product, block_products, count_parameters, head_product
from twostroke.planner.work import Work, merge, total_seconds

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits the chunked loss holds at once (``training.loss``)."""

ASSUMED_DATA_TOKEN_S = 5e-8
"""Seconds a token to cut, pack and number a batch from memory-mapped shards: 20 M tokens/s, a thousandth of a step."""

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon's orthogonalisation (Jordan et al. 2024)."""


ASSUMED_IMPORT_S = 2.0
ASSUMED_COMPILE_S = 20.0
"""Seconds to import torch and to compile one block, where nothing was measured."""


@dataclass(frozen=True)
class TrainingShape:
    """How a run trains. One optimizer step reads batch_size·sequence_length·grad_accumulation tokens; ``steps`` = 0 leaves the
    length of the run open. Raises ConfigError for impossible values."""

    batch_size: int = 16
    sequence_length: int = 512
    grad_accumulation: int = 1
    dtype: str = "bf16"
    optimizer: str = "adamw"
    compile: bool = True
    steps: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("sequence_length", 1), ("grad_accumulation", 1), ("steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")
        if self.dtype not in ("bf16", "fp32"):
            raise ConfigError(f"dtype={self.dtype!r} is not a training type. Use one of bf16, fp32.")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer={self.optimizer!r} is not known. Use one of adamw, muon.")

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward and backward: B·T."""
        return self.batch_size * self.sequence_length

    @property
    def mode(self) -> str:
        """ "compiled" or "eager", as calibrated rates are named."""
        return "compiled" if self.compile else "eager"

    @property
    def tokens_per_step(self) -> int:
        return self.tokens_per_pass * self.grad_accumulation

    @classmethod
    def from_settings(cls, settings: Any, steps: int | None = None) -> TrainingShape:
        """The shape that a recipe's ``TrainSettings`` describe; ``steps`` where they come from a budget."""
        return cls(
            batch_size=settings.batch_size,
            sequence_length=settings.sequence_length,
            grad_accumulation=settings.grad_accumulation,
            dtype=settings.dtype,
            optimizer=settings.optimizer,
            compile=settings.compile,
            steps=settings.steps if steps is None else steps,
        )


@dataclass(frozen=True)
class TrainingPlan:
    """Everything predicted of a run. Bytes and seconds are of one device; ``works`` hold the three passes by component."""

    spec: ModelSpec
    shape: TrainingShape
    hardware: Hardware
    parameters: Parameters
    memory_bytes: dict[str, float]  # by term; "peak" is apart
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    optimizer: tuple[Work, ...]
    data_s: float
    startup_s: float
    flops_per_token: float
    bytes_per_token: float
    checkpoint_bytes: float
    model_bytes: float
    network_bytes_per_step: float
    cost: Cost | None  # None while the number of steps is open
    notes: tuple[str, ...] = field(default=())

    @property
    def forward_s(self) -> float:
        """Seconds of all forward passes of one step."""
        return self.shape.grad_accumulation * total_seconds(self.forward)

    @property
    def backward_s(self) -> float:
        return self.shape.grad_accumulation * total_seconds(self.backward)

    @property
    def optimizer_s(self) -> float:
        return total_seconds(self.optimizer)

    @property
    def step_time_s(self) -> float:
        """forward + backward + optimizer + data, one after another: nothing overlaps on one device."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.data_s

    @property
    def tok_per_s(self) -> float:
        return self.shape.tokens_per_step / self.step_time_s

    @property
    def mfu(self) -> float:
        peak = self.hardware.peak(self.shape.dtype)
        return mfu(self.spec, self.shape.sequence_length, self.tok_per_s, peak)

    @property
    def peak_memory_bytes(self) -> float:
        """Sum of the terms: the process at rest, and everything that is alive when backward starts."""
        return sum(self.memory_bytes.values())

    @property
    def train_time_s(self) -> float | None:
        """Start-up and all steps; None while their number is open."""
        return self.startup_s + self.shape.steps * self.step_time_s if self.shape.steps else None

    def prediction(self) -> dict[str, float | dict[str, float]]:
        """Ledger names → values."""
        values: dict[str, float | dict[str, float]] = {
            "step_time_s": self.step_time_s,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "optimizer_s": self.optimizer_s,
            "data_s": self.data_s,
            "train_tok_per_s": self.tok_per_s,
            "mfu": self.mfu,
            "peak_memory_bytes": self.peak_memory_bytes,
            "weights_bytes": self.memory_bytes["weights"],
            "gradients_bytes": self.memory_bytes["gradients"],
            "optimizer_bytes": self.memory_bytes["optimizer"],
            "activations_bytes": self.memory_bytes["activations"],
            "checkpoint_bytes": self.checkpoint_bytes,
            "model_bytes": self.model_bytes,
            "startup_s": self.startup_s,
        }
        if self.train_time_s is not None:
            values["train_time_s"] = self.train_time_s
        if self.cost is not None:
            values["energy_kwh"] = self.cost.energy_kwh
            values["cost_usd"] = self.cost.usd
        return values

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as plain data."""
        return {
            "kind": "train",
            "model": asdict(self.spec),
            "shape": asdict(self.shape),
            "hardware": self.hardware.to_dict(),
            "parameters": self.parameters.to_dict(),
            "prediction": self.prediction(),
            "memory_bytes": {**self.memory_bytes, "peak": self.peak_memory_bytes},
            "passes": {
                name: [w.to_dict() for w in works]
                for name, works in (("forward", self.forward), ("backward", self.backward), ("optimizer", self.optimizer))
            },
            "flops_per_token": self.flops_per_token,
            "bytes_per_token": self.bytes_per_token,
            "network_bytes_per_step": self.network_bytes_per_step,
            "cost": self.cost.to_dict() if self.cost else None,
            "notes": list(self.notes),
        }


# -- time -----------------------------------------------------------------------------------------------------------------


def product_bytes(product: Product, rows: int, w: float) -> float:
    """w·(rows·k + k·n + rows·n) bytes: both operands read and the result written once."""
    return w * (rows * product.k + product.weights + rows * product.n)


def product_forward(product: Product, rows: int, dtype: str, hardware: Hardware) -> Work:
    """(rows, k) × (k, n): 2·rows·n·k FLOP."""
    moved = product_bytes(product, rows, bytes_of(dtype))
    seconds = hardware.product_s(dtype, rows, product.n, product.k)
    return _product_work(product.component, 2.0 * rows * product.weights, moved, seconds, 1, hardware)


def product_backward(product: Product, rows: int, dtype: str, hardware: Hardware) -> Work:
    """Two products: the input's gradient (rows, n) × (n, k) and the weight's (n, rows) × (rows, k); 4·rows·n·k FLOP."""
    moved = 2 * product_bytes(product, rows, bytes_of(dtype))
    to_input = hardware.product_s(dtype, rows, product.k, product.n)
    to_weight = hardware.product_s(dtype, product.n, product.k, rows)
    return _product_work(product.component, 4.0 * rows * product.weights, moved, to_input + to_weight, 2, hardware)


def _product_work(component: str, flops: float, moved: float, seconds: float, n_launches: int, hardware: Hardware) -> Work:
    """A measured rate already holds the traffic of its operands; a datasheet's does not, and the larger limit counts."""
    memory_s, launch_s = moved / hardware.bandwidth(moved), n_launches * hardware.linear_launch_s
    if hardware.basis == "measured":
        return Work(component, flops, moved, seconds, memory_s, launch_s, seconds + launch_s)
    return Work.limited(component, flops, moved, seconds, memory_s, launch_s)


def attention_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, backward: bool) -> Work:
    """softmax(QKᵀ)V of one layer: time from the keys walked, FLOP from the causal part that counts; q, k, v, o moved once
    (backward: read again with their gradients)."""
    tokens, w, length = shape.tokens_per_pass, bytes_of(shape.dtype), shape.sequence_length
    walked = 4.0 * spec.n_heads * spec.head_dim * keys_walked(hardware.kind, shape.dtype, length) * tokens
    causal = attention_flops_per_token(spec, shape.sequence_length) * tokens / spec.n_layers
    share = 2.5 if backward else 1.0
    moved = share * tokens * w * (spec.qkv_rows + spec.n_heads * spec.head_dim)
    rate = training_attention_rate(hardware, shape.dtype, shape.mode, "backward" if backward else "forward", length)
    return Work.limited(
        "attention",
        flops=(2 if backward else 1) * causal,
        n_bytes=moved,
        arithmetic_s=share * walked / rate,
        memory_s=moved / hardware.bandwidth(moved),
        launch_s=hardware.op_launch_s,
    )


LAUNCHES_PER_BLOCK = {"compiled": 4, "eager": 18}
"""Operations of one block's forward that are not products: fused kernels, or single torch operators. Backward: twice."""


def elementwise(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, backward: bool) -> list[Work]:
    """Norms, residual sums, rotary turn and activation of one layer: bytes over the rate that a calibrated block reached
    (``block_<type>_<compiled|eager>_<direction>_bytes_per_s``), or over the plain bandwidth; and QK-norm."""
    direction = "backward" if backward else "forward"
    measured = block_rate(hardware, shape.dtype, shape.mode, direction)
    elements, flops = elementwise_elements(spec, backward), elementwise_flops(spec, backward)
    launch_s = LAUNCHES_PER_BLOCK[shape.mode] * (2 if backward else 1) * hardware.op_launch_s / len(elements)
    works = []
    for component, count in elements.items():
        moved = shape.tokens_per_pass * count * bytes_of(shape.dtype)
        rate = measured or hardware.bandwidth(moved)
        works.append(Work.limited(component, shape.tokens_per_pass * flops[component], moved, 0.0, moved / rate, launch_s))
    if spec.qk_norm:
        normed = float(shape.tokens_per_pass) * (spec.n_heads + spec.n_kv_heads) * spec.head_dim
        moved = (3 if backward else 2) * normed * bytes_of(shape.dtype)
        norm_rate = head_norm_rate(hardware, shape.dtype, shape.mode, direction)
        seconds = normed / norm_rate if norm_rate else moved / hardware.bandwidth(moved)
        works.append(Work.limited("attention", (8 if backward else 4) * normed, moved, 0.0, seconds))
    return works


def loss_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, backward: bool) -> list[Work]:
    """The head and the chunked loss, which takes the logits' gradient right after the logits.

    Forward: per chunk one product, then the cross-entropy and its gradient at ``cross_entropy_<compiled|eager>_logit_per_s``
    (measured, or a bf16 read and write of the logits at the bandwidth). Backward: per chunk two products, and an fp32 sum of
    the weight's gradient that reads and writes V·E·(w + 8) bytes.
    """
    head, tokens = head_product(spec), shape.tokens_per_pass
    rows = min(LOSS_CHUNK_TOKENS, tokens)
    n_chunks = -(-tokens // rows)
    w = bytes_of(shape.dtype)
    if backward:
        moved = n_chunks * head.weights * (2 * w + 8)
        summing = Work.limited("head", 0.0, moved, 0.0, moved / hardware.bandwidth(moved), n_chunks * hardware.op_launch_s)
        return [product_backward(head, rows, shape.dtype, hardware).times(n_chunks), summing]
    logits = float(tokens) * spec.vocab_size
    moved = 2 * w * logits
    extras = hardware.extras
    rate = extras.get(f"cross_entropy_{shape.mode}_logit_per_s") or extras.get("cross_entropy_eager_logit_per_s")
    seconds = logits / rate if rate else moved / hardware.bandwidth(moved)
    entropy = Work.limited("head", 0.0, moved, 0.0, seconds, n_chunks * hardware.op_launch_s)
    return [product_forward(head, rows, shape.dtype, hardware).times(n_chunks), entropy]


def setup_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, backward: bool) -> list[Work]:
    """What surrounds the blocks: embedding, rotary tables and final norm at ``setup_<direction>_bytes_per_s``, and forward the
    mask of packed documents, B·T² elements at ``mask_element_per_s``; at the bandwidth where nothing was measured."""
    w = bytes_of(shape.dtype)
    moved = setup_bytes(spec, shape.tokens_per_pass, w, backward)
    rate = hardware.extras.get(f"setup_{'backward' if backward else 'forward'}_bytes_per_s") or hardware.bandwidth(moved)
    works = [Work.limited("embedding", 0.0, moved, 0.0, moved / rate, hardware.op_launch_s)]
    if not backward and hardware.kind == "cpu":
        # A GPU writes it too, in no time worth a term.
        elements = float(shape.tokens_per_pass) * shape.sequence_length
        written = elements * w
        element_rate = hardware.extras.get("mask_element_per_s")
        seconds = elements / element_rate if element_rate else 4 * written / hardware.bandwidth(written)
        works.append(Work.limited("attention", 0.0, written, 0.0, seconds))
    return works


def muon_matrices(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of each matrix of a block that Muon orthogonalises: q, k, v, gate and up apart, as
    ``training.optimizers`` splits the packed ones."""
    width, inner, kv = spec.d_model, spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    up = ((spec.d_ff, width), (spec.d_ff, width)) if spec.mlp == "swiglu" else ((spec.d_ff, width),)
    return ((inner, width), (kv, width), (kv, width), (width, inner), *up, (width, spec.d_ff))


def newton_schulz_products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of the products of Muon's 5 iterations on one matrix, s = min, l = max: XXᵀ, its square, and the update."""
    small, large = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * ((small, small, large), (small, small, small), (small, large, small))


def newton_schulz(rows: int, columns: int, hardware: Hardware) -> tuple[float, float]:
    """(FLOP, seconds) of those products, 5·2·(2·s²·l + s³) FLOP, in bf16 where there is a rate for it."""
    scheme = "bf16" if hardware.has_scheme("bf16") else "fp32"
    products = newton_schulz_products(rows, columns)
    return sum(2.0 * m * n * k for m, n, k in products), sum(hardware.product_s(scheme, m, n, k) for m, n, k in products)


def optimizer_bytes_moved(n_parameters: float, dtype: str, state_bytes: float | None = None) -> float:
    """Bytes one update moves: the gradient is read and widened to fp32 (w + 4), normed (4), clipped (8) and read (4); master
    and state are read and written (8 a parameter, and twice ``state_bytes``, AdamW's 8·N by default); the master is read once
    more (4) and the working copy written (w). With fp32 there is neither widening nor a copy."""
    w = bytes_of(dtype)
    return n_parameters * (24.0 if dtype == "fp32" else w + 20 + 8 + 4 + w) + 2 * (
        8.0 * n_parameters if state_bytes is None else state_bytes
    )


def optimizer_work(spec: ModelSpec, shape: TrainingShape, hardware: Hardware) -> Work:
    """One update: bytes over ``adamw_bytes_per_s`` (measured) or the bandwidth, and for Muon the Newton–Schulz products.
    About 12 FLOP a parameter for AdamW."""
    parameters = count_parameters(spec)
    moved = optimizer_bytes_moved(parameters.total, shape.dtype, optimizer_bytes(parameters, shape.optimizer))
    memory_s = moved / (hardware.extras.get("adamw_bytes_per_s") or hardware.bandwidth(moved))
    flops, arithmetic_s, launches = 12.0 * parameters.total, 0.0, 12
    if shape.optimizer == "muon":
        for rows, columns in muon_matrices(spec):
            one_flops, one_s = newton_schulz(rows, columns, hardware)
            flops += spec.n_layers * one_flops
            arithmetic_s += spec.n_layers * one_s
            rest = hardware.extras.get("muon_element_per_s")
            if rest:
                memory_s += spec.n_layers * rows * columns / rest
            else:
                launches += spec.n_layers * (3 * NEWTON_SCHULZ_STEPS + 12)
    launch_s = launches * hardware.op_launch_s
    return Work("optimizer", flops, moved, arithmetic_s, memory_s, launch_s, arithmetic_s + memory_s + launch_s)


# -- the plan -------------------------------------------------------------------------------------------------------------


def _pass(spec: ModelSpec, shape: TrainingShape, hardware: Hardware, backward: bool) -> tuple[Work, ...]:
    """One forward or backward over one micro-batch, by component."""
    make = product_backward if backward else product_forward
    layer = [make(product, shape.tokens_per_pass, shape.dtype, hardware) for product in block_products(spec)]
    layer.append(attention_work(spec, shape, hardware, backward))
    layer += elementwise(spec, shape, hardware, backward)
    works = [work.times(spec.n_layers) for work in layer]
    works += loss_work(spec, shape, hardware, backward)
    works += setup_work(spec, shape, hardware, backward)
    return merge(works)


def training_memory(spec: ModelSpec, shape: TrainingShape, hardware: Hardware) -> dict[str, float]:
    """Bytes by term when they are all alive, at the start of backward."""
    parameters = count_parameters(spec)
    chunk = min(LOSS_CHUNK_TOKENS, shape.tokens_per_pass)
    return {
        "weights": training_weights_bytes(parameters, shape.dtype),
        "gradients": gradients_bytes(parameters, shape.dtype),
        "optimizer": optimizer_bytes(parameters, shape.optimizer),
        "activations": activation_bytes(
            spec, shape.dtype, shape.compile, shape.batch_size, shape.sequence_length, hardware.kind
        ),
        "loss": loss_bytes(spec, chunk, shape.dtype, shape.compile),
        "process": process_bytes(shape, hardware),
    }


def process_bytes(shape: TrainingShape, hardware: Hardware) -> float:
    """Resident bytes of the process: Python and torch (``baseline_rss_bytes``) and the compiler (``compiler_rss_bytes``).
    Memory of a GPU holds none of it."""
    if hardware.kind == "gpu":
        return 0.0
    compiler = hardware.extras.get("compiler_rss_bytes", 0.0) if shape.compile else 0.0
    return hardware.extras.get("baseline_rss_bytes", 0.0) + compiler


def plan_training(spec: ModelSpec, shape: TrainingShape, hardware: Hardware) -> TrainingPlan:
    """Predict a training run of ``spec`` on one ``hardware``. Raises ConfigError for a type it has no rates for."""
    parameters = count_parameters(spec)
    hardware.peak(shape.dtype)
    forward, backward = _pass(spec, shape, hardware, False), _pass(spec, shape, hardware, True)
    update = (optimizer_work(spec, shape, hardware),)
    moved = shape.grad_accumulation * sum(w.bytes for w in (*forward, *backward)) + update[0].bytes
    notes = () if hardware.basis == "measured" else (DATASHEET_NOTE,)
    plan = TrainingPlan(
        spec=spec,
        shape=shape,
        hardware=hardware,
        parameters=parameters,
        memory_bytes=training_memory(spec, shape, hardware),
        forward=forward,
        backward=backward,
        optimizer=update,
        data_s=ASSUMED_DATA_TOKEN_S * shape.tokens_per_step,
        startup_s=startup_s(shape, hardware),
        flops_per_token=training_flops_per_token(spec, shape.sequence_length),
        bytes_per_token=moved / shape.tokens_per_step,
        checkpoint_bytes=checkpoint_bytes(parameters, shape.optimizer),
        model_bytes=model_bytes(parameters, "bf16" if shape.dtype == "bf16" else "fp32"),
        network_bytes_per_step=data_parallel_bytes(parameters, shape.dtype, 2),
        cost=None,
        notes=notes,
    )
    if plan.train_time_s is not None:
        plan = replace(plan, cost=cost_of(plan.train_time_s, hardware))
    return plan


def startup_s(shape: TrainingShape, hardware: Hardware) -> float:
    """Seconds before the first step: importing torch and, compiled, one block's forward and backward."""
    compile_s = hardware.extras.get("block_compile_s", ASSUMED_COMPILE_S) if shape.compile else 0.0
    return hardware.extras.get("torch_import_s", ASSUMED_IMPORT_S) + compile_s


def data_parallel_bytes(parameters: Parameters, dtype: str, n_ranks: int) -> float:
    """Bytes each of ``n_ranks`` sends per step in a ring all-reduce of the gradients: 2·(n−1)/n·w·N."""
    return 2 * (n_ranks - 1) / n_ranks * bytes_of(dtype) * parameters.total


def steps_for_budget(
    spec: ModelSpec, shape: TrainingShape, hardware: Hardware, budget_s: float, include_startup: bool = True
) -> int:
    """Optimizer steps that fit in ``budget_s`` at the predicted step time: ⌊(budget − start-up) / step time⌋, at least 1."""
    if not budget_s > 0:
        raise ConfigError(f"budget_s={budget_s:g} must be above 0.")
    plan = plan_training(spec, shape, hardware)
    left = budget_s - (plan.startup_s if include_startup else 0.0)
    return max(1, int(left / plan.step_time_s))
