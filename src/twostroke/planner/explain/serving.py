"""The terms of a serving plan: memory, the largest batch, work, latency, throughput, money."""

from __future__ import annotations

from twostroke.core.dtypes import bytes_of
from twostroke.core.policy import PAGE_TOKENS
from twostroke.core.schemes import scheme_of
from twostroke.planner.explain.attention import (
    decode_attention,
    explain_attention_flops,
    kinds_of,
    numbers_of_kinds,
)
from twostroke.planner.explain.model import cached_elements, explain_model, letters, total
from twostroke.planner.explain.money import explain_prices
from twostroke.planner.explain.native import explain_native_pass
from twostroke.planner.explain.passes import explain_pass
from twostroke.planner.explain.term import Explanation
from twostroke.planner.kv_pages import batch_pages, decoding_pages, request_pages, touched_pages
from twostroke.planner.native_passes import (
    chunks,
    decode_cache_bytes,
    decode_unknowns,
    decode_uses,
    decode_working_set,
    embedding_in_memory_bytes,
    prefill_ratio,
    prefill_unknowns,
    prefill_uses,
    price,
    step_rows,
    tokens_seen,
)
from twostroke.planner.native_products import in_int8_more_bytes, native_product_bytes, native_read_bytes
from twostroke.planner.params import block_products, count_parameters, head_product, layer_kinds
from twostroke.planner.serving import (
    CPU_MEMORY_UTILISATION,
    GPU_MEMORY_UTILISATION,
    ServingPlan,
    decode_pass,
    kv_bytes_on_device,
    memory_for_kv,
    page_bytes,
    prompt_pass,
    request_kv_bytes,
    runs_natively,
    runs_our_engine,
    stored_scheme_name,
)
from twostroke.planner.step_time import efficiencies_of
from twostroke.planner.weights import kv_scale_bytes, matrix_bytes, mixed_weights_bytes, quantises, weights_bytes


def explain_serving(plan: ServingPlan) -> Explanation:
    """Every number of ``plan``, in the order in which one follows from another."""
    terms = Explanation()
    explain_model(terms, plan.spec)
    _weights(terms, plan)
    _memory(terms, plan)
    _work(terms, plan)
    _time(terms, plan)
    _load(terms, plan)
    _money(terms, plan)
    return terms


# -- memory ---------------------------------------------------------------------------------------------------------------


def _weights(terms: Explanation, plan: ServingPlan) -> None:
    """Bytes of the whole model under its scheme, and of one device's part."""
    spec, scheme = plan.spec, stored_scheme_name(plan.spec, plan.shape, plan.hardware)
    how, whole = scheme_of(scheme), weights_bytes(plan.spec, scheme)
    mixed = mixed_weights_bytes(plan.spec, scheme, plan.shape.in_int8)
    if not how.quantised:
        terms.add("memory", "model_bytes", whole, "bytes", "w·N", f"every parameter in {scheme}", w=how.element_bytes)
    else:
        quantised = blocks = 0.0
        for kind, count in layer_kinds(spec):
            for product in kind.products:
                if quantises(how, product, spec.moe is not None):
                    quantised += count * product.stored
                    blocks += count * product.copies * how.scales(product.n, product.k)
        each = f"{how.block_rows} × {how.group or 'all'} elements"
        terms.add(
            "memory", "model_bytes", mixed, "bytes",
            f"element·quantised + scale·blocks + kept·(N − quantised){' + in_int8' if plan.shape.in_int8 else ''}",
            f"{scheme}: a scale for {each} of the blocks' matrices; the rest in 16 bits", element=how.element_bytes,
            quantised=quantised, scale=how.scale_bytes, blocks=blocks, kept=how.kept_bytes,
            **({"in_int8": mixed - whole} if plan.shape.in_int8 else {}),
        )  # fmt: skip
    if runs_natively(spec, plan.shape, plan.hardware):
        _native_weights(terms, plan)
        return
    at, value = plan.shape.placement, plan.memory_bytes["weights"]
    if at.devices == 1:
        terms.add("memory", "weights_bytes", value, "bytes", "model_bytes", "all of it on one device")
        return
    sums = {"replicated": 0.0, "expert": 0.0, "cut": 0.0}
    for kind, count in layer_kinds(spec):
        for product in kind.products:
            name = product.split if product.split in sums else "cut"
            sums[name] += count * product.copies * matrix_bytes(spec, product, scheme)
    stages = min(at.pipeline, spec.n_layers)
    ends = 1 if stages == 1 or spec.tied_embeddings else 2
    terms.add(
        "memory", "weights_bytes", value, "bytes",
        "⌈L/stages⌉/L·(cut/tensor + expert_bytes/stage_devices + replicated) "
        "+ (model_bytes − cut − expert_bytes − replicated)/tensor/ends",
        "one device: matrices cut by tensor parallel, whole experts spread, layers by stage; embedding or head at an end",
        L=spec.n_layers, stages=stages, cut=sums["cut"], expert_bytes=sums["expert"], replicated=sums["replicated"],
        tensor=at.tensor, stage_devices=at.stage_devices, ends=ends,
    )  # fmt: skip


def _native_weights(terms: Explanation, plan: ServingPlan) -> None:
    """What the native engine packs."""
    spec, shape, parameters = plan.spec, plan.shape, count_parameters(plan.spec)
    how = scheme_of(shape.scheme)
    norms = parameters.norms + parameters.final_norm + (2 * spec.n_layers * spec.head_dim if spec.qk_norm else 0)
    terms.add(
        "memory", "weights_bytes", plan.memory_bytes["weights"], "bytes",
        f"L·block + head + 4·norms + w·looked_up{' + in_int8' if shape.in_int8 else ''}",
        f"packed by the native library in {shape.scheme}, the head in {shape.head}; norms in fp32; an embedding of its own",
        L=spec.n_layers, block=sum(native_product_bytes(p, how.native_product) for p in block_products(spec)),
        head=native_product_bytes(head_product(spec), scheme_of(shape.head).native_product), norms=norms, w=how.kept_bytes,
        looked_up=parameters.positions + (0 if spec.tied_embeddings else parameters.embedding),
        **({"in_int8": in_int8_more_bytes(spec, shape.scheme, shape.in_int8)} if shape.in_int8 else {}),
    )  # fmt: skip


def _memory(terms: Explanation, plan: ServingPlan) -> None:
    spec, shape, hardware, at = plan.spec, plan.shape, plan.hardware, plan.shape.placement
    parts = [f"L{suffix}·{cached_elements(spec, kind, suffix)}" for suffix, kind, _ in kinds_of(spec)]
    scales = sum(count * kv_scale_bytes(kind, shape.cache_dtype) for kind, count in layer_kinds(spec))
    terms.add(
        "memory", "kv_bytes_per_token", plan.kv_bytes_per_token, "bytes", f"({total(parts)})·w{' + scales' if scales else ''}",
        f"keys and values of every layer in {shape.cache_dtype}; K key heads, not H{'; a scale a head' if scales else ''}",
        **numbers_of_kinds(spec) | {"w": bytes_of(shape.cache_dtype)} | ({"scales": scales} if scales else {}),
    )  # fmt: skip
    window, whole = spec.window_of_every_layer, "⌈(prompt + output)/page⌉"
    held = whole if window is None else f"min({whole}, ⌈(W − 1)/page⌉ + 1)"
    within = {} if window is None else {"W": window}
    terms.add(
        "memory", "kv_request_bytes", request_kv_bytes(spec, shape), "bytes",
        f"{whole if window is None else f'max(⌈prompt/page⌉, {held})'}·page·kv_bytes_per_token",
        "a request's last page is counted whole" + ("" if window is None else "; what is behind the window is given back"),
        prompt=shape.prompt_tokens, output=shape.output_tokens, page=PAGE_TOKENS, **within,
    )  # fmt: skip
    numbers: dict[str, float] = {"page": PAGE_TOKENS, "pages": plan.pages, "heads": 1}
    over = ""
    if at.devices > 1:
        numbers["heads"] = 1 if spec.mla is not None else min(at.tensor, spec.n_kv_heads)
        numbers |= {"stages": min(at.pipeline, spec.n_layers), "groups": at.attention_groups}
        over = "/(heads·stages·groups)"
    here = kv_bytes_on_device(spec, shape, request_kv_bytes(spec, shape))
    terms.add(
        "memory", "kv_request_here_bytes", here, "bytes", f"kv_request_bytes{over}",
        "of it on one device: key heads by tensor, layers by stage, requests by attention group", **numbers,
    )  # fmt: skip
    share = GPU_MEMORY_UTILISATION if hardware.kind == "gpu" else CPU_MEMORY_UTILISATION
    process = hardware.process.resident_bytes
    terms.add(
        "memory", "room_for_kv_bytes", memory_for_kv(spec, shape, hardware), "bytes", "share·memory − weights_bytes − process",
        f"{hardware.label}: memory {hardware.basis}, share assumed", "assumed",
        share=share, memory=hardware.memory_bytes, process=process,
    )  # fmt: skip
    if decoding_pages(spec, shape) == request_pages(spec, shape) and shape.answers == 1:
        terms.add(
            "memory", "largest_batch", plan.largest_batch, "requests", "⌊room_for_kv_bytes/kv_request_here_bytes⌋",
            "whole requests",
        )  # fmt: skip
    else:
        first = request_pages(spec, shape) - decoding_pages(spec, shape)
        each = batch_pages(spec, shape, shape.answers) - first
        on_device = kv_bytes_on_device(spec, shape, page_bytes(spec, shape))
        terms.add(
            "memory", "largest_batch", plan.largest_batch, "requests",
            "⌊(room_for_kv_bytes/page_bytes − first)/each⌋·answers",
            "pages of a prompt with its answers as they decode, and those that a prompt holds beyond that when it comes",
            page_bytes=on_device, first=first, each=each, answers=shape.answers,
        )  # fmt: skip
    terms.add(
        "memory", "kv_cache_bytes", plan.kv_cache_bytes, "bytes", f"pages·page·kv_bytes_per_token{over}",
        "whole pages of the cache the engine takes, one device", **numbers,
    )  # fmt: skip
    guess = shape.speculation
    terms.add(
        "memory", "logits_bytes", plan.memory_bytes["logits"], "bytes", f"4·V·⌈B/groups⌉{'' if guess is None else '·(γ + 1)'}",
        "a step's logits in fp32: a row for each token that is drawn or checked", V=spec.vocab_size, B=shape.batch,
        groups=at.attention_groups, **({} if guess is None else {"γ": guess.draft_tokens}),
    )  # fmt: skip
    if runs_natively(spec, shape, hardware):
        _native_memory(terms, plan)
        return
    terms.add(
        "memory", "activations_bytes", plan.memory_bytes["activations"], "bytes", "min(prompt, 8192)·(4·E + 3·F)·w",
        "one layer of the longest prefill", prompt=shape.prompt_tokens, E=spec.d_model, F=spec.d_ff,
        w=bytes_of(shape.compute_dtype),
    )  # fmt: skip
    terms.add(
        "memory", "peak_memory_bytes", plan.peak_memory_bytes, "bytes",
        "weights_bytes + kv_cache_bytes + activations_bytes + logits_bytes + process", "all are held while serving",
        process=process,
    )  # fmt: skip


def _native_memory(terms: Explanation, plan: ServingPlan) -> None:
    spec, shape, process = plan.spec, plan.shape, plan.memory_bytes["process"]
    terms.add(
        "memory", "kv_touched_bytes", plan.memory_bytes["kv_cache"], "bytes",
        "min(kv_cache_bytes, touched·page·kv_bytes_per_token)",
        "the cache takes memory as its pages are touched; a server that runs on fills all of it",
        touched=touched_pages(spec, shape), page=PAGE_TOKENS,
    )  # fmt: skip
    looked_up = embedding_in_memory_bytes(spec, tokens_seen(shape)) if spec.tied_embeddings else 0.0
    terms.add(
        "memory", "activations_bytes", plan.memory_bytes["activations"], "bytes",
        "rows·6·(2·E + qkv + H·D + 2·F) + looked_up",
        "working memory of the largest step; the parts of a tied embedding that are looked up in its file",
        rows=step_rows(shape), E=spec.d_model, qkv=spec.qkv_rows, H=spec.n_heads, D=spec.head_dim, F=spec.d_ff,
        looked_up=looked_up,
    )  # fmt: skip
    terms.add(
        "memory", "peak_memory_bytes", plan.peak_memory_bytes, "bytes",
        "weights_bytes + kv_touched_bytes + activations_bytes + logits_bytes + process",
        "the process with torch and the engine imported", process=process,
    )  # fmt: skip


# -- work -----------------------------------------------------------------------------------------------------------------


def _work(terms: Explanation, plan: ServingPlan) -> None:
    spec, shape = plan.spec, plan.shape
    explain_attention_flops(terms, spec, "prompt", shape.prompt_tokens)
    active = "N_matrices_active" if any(t.symbol == "N_matrices_active" for t in terms) else "N_matrices"
    matrices = f"2·({active} + N_projections)" if count_parameters(spec).projections else f"2·{active}"
    numbers = letters(spec) | {"prompt": shape.prompt_tokens, "context": shape.context, "E_head": head_product(spec).k}
    terms.add(
        "work", "prefill_flops_per_token", plan.prefill_flops_per_token, "FLOP",
        f"{matrices} + 2·V·E_head/prompt + attention_flops_per_token", "the head for the last token only", **numbers,
    )  # fmt: skip
    terms.add(
        "work", "decode_flops_per_token", plan.decode_flops_per_token, "FLOP",
        f"{matrices} + 2·V·E_head + {decode_attention(spec, 'context', shape.context)}", "one new token at the mean context",
        **numbers | numbers_of_kinds(spec),
    )  # fmt: skip


# -- time -----------------------------------------------------------------------------------------------------------------


def _time(terms: Explanation, plan: ServingPlan) -> None:
    spec, shape, hardware, basis = plan.spec, plan.shape, plan.hardware, f"rates {plan.hardware.basis}"
    if runs_natively(spec, shape, hardware):
        _native_time(terms, plan)
    elif runs_our_engine(spec, shape, hardware):
        for symbol, works, what in (
            ("ttft_s", plan.prefill, "one prompt alone"),
            ("step_s", plan.decode, f"one step of {shape.batch} requests"),
        ):
            terms.add(
                "time", symbol, sum(w.seconds for w in works), "s", " + ".join(w.component for w in works),
                f"{what}; {basis}: products, attention, operators of the engine as calibrated", "measured",
                **{w.component: w.seconds for w in works},
            )  # fmt: skip
    else:
        rates = efficiencies_of(hardware, shape.engine)
        explain_pass(terms, "prefill", "ttft_s", prompt_pass(spec, shape, hardware), rates, hardware)
        explain_pass(terms, "decode", "step_s", decode_pass(spec, shape, hardware), rates, hardware)
    if shape.speculation is None or plan.check_s is None:
        terms.add("time", "tpot_s", plan.tpot_s, "s", "step_s", "a token a step")
    else:
        guess = shape.speculation
        formula = "(1 − α^(γ + 1))/(1 − α)" if guess.acceptance < 1 else "γ + 1"
        numbers = {"α": guess.acceptance, "γ": guess.draft_tokens, "c": guess.draft_cost, "check_s": plan.check_s}
        source = "Leviathan et al., arXiv 2211.17192"
        terms.add("time", "tokens_per_step", guess.tokens_per_step, "tokens", formula, f"{source}, equation 1", **numbers)
        terms.add(
            "time", "tpot_s", plan.tpot_s, "s", "(γ·c·step_s + check_s)/tokens_per_step",
            f"{source}: drafting, and a step that checks γ + 1 tokens", **numbers,
        )  # fmt: skip
    terms.add(
        "time", "e2e_s", plan.e2e_s, "s", "ttft_s + (output − 1)·tpot_s", "the first token is the prefill's",
        output=shape.output_tokens,
    )  # fmt: skip
    counts = {"B": shape.batch, "prompt": shape.prompt_tokens, "output": shape.output_tokens}
    terms.add("time", "prefill_tok_per_s", plan.prefill_tok_per_s, "tok/s", "prompt/ttft_s", "one prompt alone", **counts)
    terms.add("time", "decode_tok_per_s", plan.decode_tok_per_s, "tok/s", "B/tpot_s", "all requests together", **counts)
    terms.add(
        "time", "output_tok_per_s", plan.output_tok_per_s, "tok/s", "B·output/(B/answers·ttft_s + output·tpot_s)",
        "a batch kept full, prefills one after another", **counts, answers=shape.answers,
    )  # fmt: skip


def _native_time(terms: Explanation, plan: ServingPlan) -> None:
    spec, shape, hardware = plan.spec, plan.shape, plan.hardware
    token, weights = plan.kv_bytes_per_token, native_read_bytes(spec, shape.scheme, shape.head, shape.in_int8)
    cached = sum(start + count for start, count in chunks(shape)) * token
    for name, symbol, uses, units, working_set, kv_bytes, ratio, value in (
        ("prefill", "ttft_s", prefill_uses(spec, shape), prefill_unknowns(spec, shape), weights, cached,
         prefill_ratio(spec, shape, hardware), plan.ttft_s),
        ("decode", "step_s", decode_uses(spec, shape), decode_unknowns(spec, shape), decode_working_set(spec, shape),
         decode_cache_bytes(spec, shape), 1.0, plan.step_s),
    ):  # fmt: skip
        prices = {unit: price(hardware, name, shape.scheme, unit) for unit in units}
        explain_native_pass(terms, name, symbol, uses, units, prices, working_set, kv_bytes, ratio, value, hardware)


def _load(terms: Explanation, plan: ServingPlan) -> None:
    """B users who each ask again at once."""
    shape, steps, loaded = plan.shape, plan.steps, plan.loaded
    users = shape.prompts
    numbers = {"B": users, "output": shape.output_tokens}
    if users == 1:
        terms.add("load", "loaded_ttft_s", loaded.ttft_s, "s", "ttft_s", "nobody is beside it")
        terms.add("load", "loaded_e2e_s", loaded.e2e_s, "s", "ttft_s + (output − 1)·tpot_s", "of a whole answer", **numbers)
    else:
        beside = "ttft_s" if plan.prompt_beside_s is None else "prompt_beside_s"
        among = numbers | {"g": steps.together(users), "interference": plan.interference}
        among |= {} if plan.prompt_beside_s is None else {"prompt_beside_s": plan.prompt_beside_s}
        terms.add(
            "load", "prompt_s", steps.prompt_s(users), "s", f"g/B·ttft_s + (1 − g/B)·interference·{beside}",
            "a prompt, g of which share a step: alone, or beside others that decode", **among,
        )  # fmt: skip
        terms.add(
            "load", "loaded_ttft_s", loaded.ttft_s, "s", "g·prompt_s + 2·(1 − g/B)·tpot_s",
            "those that end together come together; the step it comes in and its own", **among,
        )  # fmt: skip
        terms.add(
            "load", "loaded_e2e_s", loaded.e2e_s, "s",
            "B·prompt_s + 2·(1 − g/B)·tpot_s + (output − 1)·tpot_s", "every user's prompt once, waiting, its steps", **among,
        )  # fmt: skip
    formula = "(loaded_e2e_s − loaded_ttft_s)/(output − 1)" if shape.output_tokens > 1 else "tpot_s"
    terms.add("load", "loaded_tpot_s", loaded.tpot_s, "s", formula, "other users' prompts are between tokens", **numbers)


def _money(terms: Explanation, plan: ServingPlan) -> None:
    explain_prices(terms, plan.hardware)
    by_phase = plan.usd_by_phase
    for symbol, value, rate, what in (
        ("usd_per_mtok", plan.usd_per_mtok, "output_tok_per_s", "output tokens, prefill included"),
        ("input_usd_per_mtok", by_phase.input_usd_per_mtok, "prefill_tok_per_s", "prompt tokens"),
        ("output_usd_per_mtok", by_phase.output_usd_per_mtok, "decode_tok_per_s", "output tokens, prefill apart"),
    ):
        terms.add(
            "money", symbol, value, "usd", f"devices·usd_per_hour·1e6/(3600·{rate})", f"per million {what}, never idle",
            devices=plan.devices,
        )  # fmt: skip
    terms.add(
        "money", "kwh_per_mtok", plan.kwh_per_mtok, "kWh", "devices·watts·PUE/1000·1e6/(3600·output_tok_per_s)",
        "per million output tokens", devices=plan.devices,
    )  # fmt: skip
