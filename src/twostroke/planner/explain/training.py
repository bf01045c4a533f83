"""The terms of a training plan: memory, work, time by operation, rate, storage, money."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.core.dtypes import bytes_of
from twostroke.planner.explain.model import explain_model
from twostroke.planner.explain.money import explain_run_cost
from twostroke.planner.explain.term import Explanation, Mark
from twostroke.planner.flops import attention_flops_per_token
from twostroke.planner.memory import activation_bytes_per_token_and_layer, attends_explicitly, keys_walked, query_blocks
from twostroke.planner.training import ASSUMED_DATA_TOKEN_S, LOSS_CHUNK_TOKENS, TrainingPlan
from twostroke.planner.work import Work

KORTHIKANTI = "what autograd keeps (after Korthikanti et al., arXiv 2205.05198), flash attention and gated MLP counted"
ZERO = "Rajbhandari et al., arXiv 1910.02054, section 3"
PALM = "PaLM, arXiv 2204.02311, appendix B; causal half of the keys"


def explain_training(plan: TrainingPlan) -> Explanation:
    """Every number of ``plan``, in the order in which one follows from another."""
    terms = Explanation()
    explain_model(terms, plan.spec)
    _batch(terms, plan)
    _memory(terms, plan)
    _work(terms, plan)
    _time(terms, plan)
    _storage(terms, plan)
    explain_run_cost(terms, plan.cost, plan.hardware)
    return terms


def _batch(terms: Explanation, plan: TrainingPlan) -> None:
    shape = plan.shape
    terms.add(
        "batch", "tokens_per_pass", shape.tokens_per_pass, "tokens", "B·T", "the shape asked for", "given",
        B=shape.batch_size, T=shape.sequence_length,
    )  # fmt: skip
    terms.add(
        "batch", "tokens_per_step", shape.tokens_per_step, "tokens", "tokens_per_pass·passes",
        "gradients of all passes are summed before one update", "given", passes=shape.grad_accumulation,
    )  # fmt: skip


# -- memory ---------------------------------------------------------------------------------------------------------------


def _memory(terms: Explanation, plan: TrainingPlan) -> None:
    spec, shape, memory = plan.spec, plan.shape, plan.memory_bytes
    w = bytes_of(shape.dtype)
    copy = "4 + w" if shape.dtype != "fp32" else "4"
    terms.add(
        "memory", "weights_bytes", memory["weights"], "bytes", f"N·({copy})",
        "fp32 master weights, and the working copy that forward and backward read", w=w,
    )  # fmt: skip
    terms.add(
        "memory", "gradients_bytes", memory["gradients"], "bytes", f"N·({copy})",
        "fp32 gradients that the optimizer reads, and those that backward leaves in the working type", w=w,
    )  # fmt: skip
    if shape.optimizer == "muon":
        formula, source = "4·N_matrices + 8·(N − N_matrices)", "one fp32 momentum for blocks' matrices, AdamW for the rest"
    else:
        formula, source = "2·4·N", f"two fp32 moments; {ZERO}"
    terms.add("memory", "optimizer_bytes", memory["optimizer"], "bytes", formula, source)
    _activations(terms, plan)
    chunk = min(LOSS_CHUNK_TOKENS, shape.tokens_per_pass)
    logit = "2·w" if shape.compile else "(2·w + 5·4 + 1)"
    terms.add(
        "memory", "loss_bytes", memory["loss"], "bytes", f"chunk·V·{logit} + V·E·(4 + w)",
        "one chunk's logits with their gradient, and the head's gradient in fp32 beside a chunk's share",
        chunk=chunk, V=spec.vocab_size, E=spec.d_model, w=w,
    )  # fmt: skip
    mark: Mark = "measured" if memory["process"] else "given"
    extras = plan.hardware.extras
    terms.add(
        "memory", "process_bytes", memory["process"], "bytes", "python_and_torch + compiler",
        "resident memory of the process at rest; a GPU's memory holds none of it", mark,
        python_and_torch=extras.get("baseline_rss_bytes", 0.0) if plan.hardware.kind == "cpu" else 0.0,
        compiler=extras.get("compiler_rss_bytes", 0.0) if plan.hardware.kind == "cpu" and shape.compile else 0.0,
    )  # fmt: skip
    parts = " + ".join(f"{name}_bytes" for name in memory)
    terms.add("memory", "peak_memory_bytes", plan.peak_memory_bytes, "bytes", parts, "what is alive when backward starts")


def _activations(terms: Explanation, plan: TrainingPlan) -> None:
    spec, shape, kind = plan.spec, plan.shape, plan.hardware.kind
    w, explicit = bytes_of(shape.dtype), attends_explicitly(plan.hardware.kind, shape.dtype, shape.sequence_length)
    gated, rms, rope = spec.mlp == "swiglu", spec.norm == "rmsnorm", spec.positions == "rope"
    numbers: dict[str, float] = {
        "w": w, "E": spec.d_model, "F": spec.d_ff, "H": spec.n_heads, "K": spec.n_kv_heads, "D": spec.head_dim,
        "T": shape.sequence_length,
    }  # fmt: skip
    parts = [f"w·(4·E + {3 if gated else 2}·F)", "2·4" if rms else "2·2·w"]
    if explicit:
        length = shape.sequence_length
        numbers["keys"] = keys_walked(kind, shape.dtype, length)
        numbers["copies"] = sum(end for _, end in query_blocks(length)) / length
        parts.append("H·w·(keys + 2·D + 2·D·copies)")
    else:
        turned = "(H + K)·D" if rope else "0"
        parts.append(f"w·((H + 2·K)·D + {turned} + H·D) + 4·H")
    if spec.qk_norm:
        parts.append("4·(H + K)")
        if explicit and shape.compile:
            parts.append("w·(H + 2·K)·D")
    if not shape.compile:
        parts += ["w·F"] if gated else []
        parts += ["2·(8 − w)·E"] if rms else []
        if spec.qk_norm:
            parts.append(f"{8 if shape.dtype != 'fp32' else 4}·(H + K)·D")
    layer = activation_bytes_per_token_and_layer(spec, shape.dtype, shape.compile, shape.sequence_length, kind)
    attention = "explicit attention keeps its probabilities" if explicit else "flash attention keeps no T×T matrix"
    terms.add(
        "memory", "activation_bytes_per_token_and_layer", layer, "bytes", " + ".join(parts), f"{KORTHIKANTI}; {attention}",
        **numbers,
    )  # fmt: skip
    around = ["8", "8·E + 4" if rms else "w·E + 2·w", "w·E"]
    around += ["4·D"] if rope else []
    around += [] if explicit else ["w·T"]
    terms.add(
        "memory", "activations_bytes", plan.memory_bytes["activations"], "bytes",
        f"tokens_per_pass·(L·activation_bytes_per_token_and_layer + {' + '.join(around)}) + w·V·E",
        "blocks; around them ids, final norm, hidden gradients, rotary tables, mask; the head's gradient",
        **numbers, L=spec.n_layers, V=spec.vocab_size,
    )  # fmt: skip


# -- work -----------------------------------------------------------------------------------------------------------------


def _work(terms: Explanation, plan: TrainingPlan) -> None:
    terms.add(
        "work", "attention_flops_per_token", attention_flops_per_token(plan.spec, plan.shape.sequence_length), "FLOP",
        "4·H·D·keys_of_all_layers", PALM,
        H=plan.spec.n_heads, D=plan.spec.head_dim, keys_of_all_layers=_keys_of_all_layers(plan),
    )  # fmt: skip
    terms.add(
        "work", "flops_per_token", plan.flops_per_token, "FLOP", "6·N_multiplied + 3·attention_flops_per_token",
        f"2 forward, 4 backward; {PALM}",
    )  # fmt: skip


def _keys_of_all_layers(plan: TrainingPlan) -> float:
    """Σ over layers of the keys an average query attends to."""
    length = plan.shape.sequence_length
    windows = [plan.spec.window_of_layer(i) for i in range(plan.spec.n_layers)]
    return sum(length / 2 if w is None or w >= length else w - w * w / (2 * length) for w in windows)


def _components(works: Sequence[Work]) -> tuple[str, dict[str, float]]:
    """Formula and numbers of a pass: seconds of its components, one after another."""
    return " + ".join(w.component for w in works), {w.component: w.seconds for w in works}


def _time(terms: Explanation, plan: TrainingPlan) -> None:
    passes, basis = plan.shape.grad_accumulation, f"rates {plan.hardware.basis}"
    for direction, works, value in (("forward", plan.forward, plan.forward_s), ("backward", plan.backward, plan.backward_s)):
        formula, numbers = _components(works)
        source = f"components one after another; {basis}"
        terms.add("time", f"{direction}_s", value, "s", f"passes·({formula})", source, passes=passes, **numbers)
    formula, numbers = _components(plan.optimizer)
    terms.add("time", "optimizer_s", plan.optimizer_s, "s", formula, f"one update; {basis}", **numbers)
    terms.add(
        "time", "data_s", plan.data_s, "s", "tokens_per_step·seconds_a_token", "cutting and packing a batch", "assumed",
        seconds_a_token=ASSUMED_DATA_TOKEN_S,
    )  # fmt: skip
    terms.add(
        "time", "step_time_s", plan.step_time_s, "s", "forward_s + backward_s + optimizer_s + data_s",
        "nothing overlaps on one device",
    )  # fmt: skip
    terms.add("time", "tok_per_s", plan.tok_per_s, "tok/s", "tokens_per_step/step_time_s", "all passes of one update")
    peak = plan.hardware.peak(plan.shape.dtype)
    terms.add(
        "time", "MFU", plan.mfu, "share", "flops_per_token·tok_per_s/π",
        f"π: {plan.hardware.basis} rate of {plan.shape.dtype} products", π=peak,
    )  # fmt: skip
    if plan.train_time_s is not None:
        terms.add(
            "time", "train_time_s", plan.train_time_s, "s", "startup + steps·step_time_s",
            "importing and compiling, then all steps", startup=plan.startup_s, steps=plan.shape.steps,
        )  # fmt: skip


# -- storage --------------------------------------------------------------------------------------------------------------


def _storage(terms: Explanation, plan: TrainingPlan) -> None:
    terms.add(
        "storage", "checkpoint_bytes", plan.checkpoint_bytes, "bytes", "4·N + optimizer_bytes",
        "fp32 master weights and the optimizer's state on disk",
    )  # fmt: skip
    w = 2 if plan.shape.dtype == "bf16" else 4
    terms.add("storage", "model_bytes", plan.model_bytes, "bytes", "w·N", "the finished model on disk", w=w)
