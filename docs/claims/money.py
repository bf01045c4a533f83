"""Claims on cost, crossover, networks and what hardware to buy."""

from __future__ import annotations

import math
from functools import lru_cache

from claims.claim import Case, Claim, Figure, about, pick
from claims.subjects import GB, LLAMA_3B, LLAMA_8B, LLAMA_70B, device, n_parameters
from twostroke.core.errors import CapacityError
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.network import ring_all_reduce_s
from twostroke.planner.hardware.tables import price
from twostroke.planner.money.cost import (
    ProjectInputs,
    bought_rate,
    co2_kg,
    energy_kwh,
    project_cost,
    pue_of,
    usd_per_million_tokens,
)
from twostroke.planner.serving.plan import ServingPlan, plan_serving
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.work.flops import training_flops_per_token
from twostroke.planner.work.weights import kv_bytes_per_token

MFU = 0.4
"""Assumed. Llama 3 405B reports 38 to 43% on H100 (arXiv 2407.21783, table 4)."""

UTILISATION = 0.3
"""Assumed share of the time that a server is as busy as planned: days have nights."""

GPT4_FLOP = 2.1e25
"""Epoch AI's estimate of GPT-4's training compute; its makers publish none."""

A100_MFU = 0.34
"""Assumed with it: the utilisation that the same estimate takes."""


A100_USD_2022 = 3.5
"""Assumed rent of an A100 for an hour when it was trained."""


def training_usd(spec: ModelSpec, tokens: float, name: str = "h100-sxm", sequence_length: int = 8192) -> float:
    """D·(FLOP a token) ÷ (π·MFU) · $/h, rent of one final run."""
    hardware = device(name)
    seconds = tokens * training_flops_per_token(spec, sequence_length) / (hardware.peak("bf16") * MFU)
    return seconds / 3600 * hardware.usd_per_hour.value


@lru_cache(maxsize=64)
def served(name: str, spec: ModelSpec, batch: int, scheme: str = "bf16", prompt: int = 1000, output: int = 500) -> ServingPlan:
    shape = ServingShape(scheme=scheme, batch=batch, prompt_tokens=prompt, output_tokens=output)
    return plan_serving(spec, shape, device(name))


def query_usd(plan: ServingPlan, utilisation: float = UTILISATION) -> float:
    """One answer: its share of a machine that is busy for ``utilisation`` of the time."""
    rate = usd_per_million_tokens(plan.output_tok_per_s, plan.hardware.usd_per_hour.value, utilisation)
    return rate * plan.shape.output_tokens / 1e6


def training_throughput() -> Claim:
    hardware, n_devices = device("h100-sxm"), 1024
    flops = 15e12 * training_flops_per_token(LLAMA_8B, 8192)
    days = flops / (hardware.peak("bf16") * MFU * n_devices) / 86400
    usd = training_usd(LLAMA_8B, 15e12)
    fine_days = 1e8 * training_flops_per_token(LLAMA_8B, 2048) / (hardware.peak("bf16") * MFU * 8) / 86400
    fine_usd = training_usd(LLAMA_8B, 1e8, sequence_length=2048)
    slow = 28 / 30
    month = 30 * 24 * n_devices * hardware.usd_per_hour.value
    cases = (
        Case("days", "8B on 15·10¹² tokens, 1,024 H100", days, "days", f"D·FLOP ÷ (1,024·π·{MFU})"),
        Case("usd", "its rent", usd, "usd", f"${hardware.usd_per_hour.value:.4g} a device-hour"),
        Case("saved_days", "days that 10% more throughput saves", days * (1 - 1 / 1.1), "days", "T·(1 − 1/1.1)"),
        Case("saved_usd", "money it saves", usd * (1 - 1 / 1.1), "usd", "C·(1 − 1/1.1)"),
        Case("fine_hours", "fine-tuning 8B on 10⁸ tokens, 8 H100: hours", fine_days * 24, "count", "the same arithmetic"),
        Case("fine_days", "days that 10% saves there", fine_days * (1 - 1 / 1.1), "days", "T·(1 − 1/1.1)"),
        Case("fine_saved", "money that 10% saves there", fine_usd * (1 - 1 / 1.1), "usd", "C·(1 − 1/1.1)"),
        Case("boundary", "run whose 10% are 1,000 $", 1_000 / (1 - 1 / 1.1), "usd", "1,000 ÷ (1 − 1/1.1)"),
        Case("two_days", "28 instead of 30 days on the same 1,024 devices", month * (1 - slow), "usd", "2·24·1,024·$/h"),
    )
    return Claim(
        "training_throughput",
        "Training throughput",
        (f"{100 * MFU:.0f}% MFU assumed; H100 SXM at its listed price",),
        cases,
        (
            Figure("10% saves days", "at least one", 1, math.inf, pick(cases, "saved_days", "fine_days")),
            Figure("10% saves thousands of dollars", "at least 1,000", 1000, math.inf, pick(cases, "saved_usd", "fine_saved")),
            Figure("28 or 30 days does not matter", "at most 1,000 dollars", 0, 1000, pick(cases, "two_days")),
        ),
        f"the run costs more than 11,000 $: 8B on 15·10¹² tokens saves {cases[2].value:.1f} days and "
        f"{cases[3].value / 1e3:,.0f} k$.",
        f"A fine-tuning of {24 * fine_days:.1g} hours saves {fine_usd * (1 - 1 / 1.1):.2g} $. And two days of thirty are "
        "7%: on the "
        "machine of "
        f"the first sentence {month * (1 - slow) / 1e3:,.0f} k$, so the two sentences contradict each other.",
    )


def cost() -> Claim:
    hardware = device("h100-sxm")
    per_token = training_usd(LLAMA_70B, 1.0)
    gpt4_hours = GPT4_FLOP / (device("a100-sxm-80gb").peak("bf16") * A100_MFU) / 3600
    a100_usd = device("a100-sxm-80gb").usd_per_hour.value
    gpt4 = gpt4_hours * a100_usd
    gpt4_dear = gpt4_hours * A100_USD_2022
    small = served("h100-sxm", LLAMA_8B, 32)
    large = served("mi300x", LLAMA_70B, 16)
    alone = served("mi300x", LLAMA_70B, 1)
    cases = (
        Case("seventy_2t", "70B on 2·10¹² tokens", 2e12 * per_token, "usd", f"D·FLOP ÷ (π·{MFU}) · $/h"),
        Case("seventy_5t", "70B on 5·10¹² tokens", 5e12 * per_token, "usd", "the same"),
        Case("seventy_15t", "70B on 15·10¹² tokens", 15e12 * per_token, "usd", "the same"),
        Case("tokens_2m", "tokens for 2 M$", 2e6 / per_token, "tokens", "2·10⁶ ÷ $ a token"),
        Case("tokens_10m", "tokens for 10 M$", 10e6 / per_token, "tokens", "10⁷ ÷ $ a token"),
        Case(
            "gpt4",
            f"{GPT4_FLOP / 1e25:g}·10²⁵ FLOP on A100 at {100 * A100_MFU:.0f}% and today's listed price",
            gpt4,
            "usd",
            f"{gpt4_hours / 1e6:.3g} M device-hours · ${a100_usd:.3g}",
        ),
        Case(
            "gpt4_dear",
            f"the same at {A100_USD_2022:g} $ an hour",
            gpt4_dear,
            "usd",
            f"device-hours · {A100_USD_2022:g} $, assumed for 2022",
        ),
        Case(
            "query_small",
            f"a query to 8B (1,000 + 500 tokens, 32 at once, busy {100 * UTILISATION:g}% of the time)",
            query_usd(small),
            "usd",
            "$/Mtok ÷ utilisation · 500",
        ),
        Case("query_large", "a query to 70B on one MI300X, 16 at once", query_usd(large), "usd", "the same"),
        Case("query_alone", "the same, one at a time", query_usd(alone), "usd", "the same"),
        Case("billion_day", "a billion queries a day at 0.001 $", 1e6, "usd", "10⁹·0.001, a day"),
        Case("ten_billion_low", "10·10⁹ queries a year at 0.001 $", 1e7, "usd", "10¹⁰·0.001, a year"),
        Case("ten_billion_high", "10·10⁹ queries a year at 0.005 $", 5e7, "usd", "10¹⁰·0.005, a year"),
    )
    return Claim(
        "cost",
        "Cost of training and of a query",
        (
            f"rent at listed prices, {100 * MFU:.0f}% MFU, final run only",
            f"serving busy {100 * UTILISATION:.0f}% of the time",
            "GPT-4's compute is Epoch AI's estimate",
        ),
        cases,
        (
            Figure(
                "70B training 2–10 M$", "dollars", 2000000.0, 10000000.0, pick(cases, "seventy_2t", "seventy_5t", "seventy_15t")
            ),
            Figure("GPT-4 100–200 M$", "dollars", 100000000.0, 200000000.0, pick(cases, "gpt4", "gpt4_dear")),
            Figure("a query $0.001–0.01", "dollars", 0.001, 0.01, pick(cases, "query_small", "query_large", "query_alone")),
            Figure(
                "a billion queries a day at $0.001: 1 M$ a day", "within a tenth", *about(1000000.0), pick(cases, "billion_day")
            ),
            Figure(
                "a 5 M$ model with 10 G queries: 10–50 M$ a year",
                "dollars",
                10000000.0,
                50000000.0,
                pick(cases, "ten_billion_low", "ten_billion_high"),
            ),
        ),
        f"70B sees {2 / per_token / 1e6:.2g} to {10 / per_token / 1e6:.2g}·10¹² tokens. GPT-4's order needs "
        f"{gpt4_hours / 1e6:.2g} M A100-hours at {a100_usd:.2g} to {A100_USD_2022:g} $. "
        f"A query to 70B costs ${query_usd(large):.2g} in a batch of "
        "16. The "
        "last two are products of their own inputs.",
        f"70B on 15·10¹² tokens, as models of that size are trained now, costs {15e12 * per_token / 1e6:.2g} M$ at "
        f"${hardware.usd_per_hour.value:.3g} an hour. A query to 8B costs ${query_usd(small):.1g}, below the range; one "
        "request at a "
        f"time on 70B costs ${query_usd(alone):.2g}, above it.",
    )


def crossover() -> Claim:
    plan = served("h100-sxm", LLAMA_8B, 32)
    run = training_usd(LLAMA_8B, 15e12)
    a_query = query_usd(plan)
    stated_day = 1e10 / 365 * 0.003
    needed = run / (180 * a_query)
    fine = training_usd(LLAMA_8B, 1e8, sequence_length=2048)
    year = needed * 365 * a_query
    cases = (
        Case(
            "stated_days", "5 M$ model, 10·10⁹ queries a year at 0.003 $", 5e6 / stated_day, "days", "5·10⁶ ÷ (10¹⁰/365·0.003)"
        ),
        Case("run", "8B on 15·10¹² tokens", run, "usd", "training rent"),
        Case("query", "a query to it", a_query, "usd", "$/Mtok ÷ utilisation · 500"),
        Case("queries_a_day", "queries a day for a crossover after 180 days", needed, "requests", "run ÷ (180·$ a query)"),
        Case(
            "million_days",
            "days to the crossover at a million queries a day",
            run / (1e6 * a_query),
            "days",
            "run ÷ (10⁶·$ a query)",
        ),
        Case(
            "fine_queries",
            "queries that cost as much as fine-tuning it on 10⁸ tokens",
            fine / a_query,
            "requests",
            "fine-tuning ÷ $ a query",
        ),
        Case(
            "ten_serving", "what 10% off serving is worth in three years at that rate", 0.1 * 3 * year, "usd", "0.1·3·365·q·$"
        ),
        Case("ten_training", "what 10% off training is worth", 0.1 * run, "usd", "0.1·run, once"),
    )
    return Claim(
        "crossover",
        "When serving has cost more than training",
        (f"rent at listed prices; 1,000 + 500 tokens a query, 32 at once, busy {100 * UTILISATION:.0f}% of the time",),
        cases,
        (
            Figure(
                "cumulative inference cost passes training within months",
                "at most a year, in days",
                0,
                365,
                pick(cases, "stated_days", "million_days"),
            ),
            Figure(
                "10% of a recurring cost against 10% of a one-time cost",
                "worth more than 10% of training",
                cases[7].value,
                math.inf,
                pick(cases, "ten_serving"),
            ),
        ),
        f"the model is used enough: {cases[3].value / 1e6:.2g} M queries a day for this 8B model; then 10% off serving is "
        "worth "
        f"{cases[6].value / cases[7].value:.2g}× 10% off training in three years. A fine-tuned model crosses after "
        f"{cases[5].value:,.0f} queries.",
        f"At a million queries a day it takes {cases[4].value / 365:.2g} years: most models are replaced before.",
        decided_by="twostroke plan crossover",
    )


def hidden_costs() -> Claim:
    run = training_usd(LLAMA_8B, 1.6e11)
    inputs = ProjectInputs(
        data_acquisition_usd=20_000,
        data_cleaning_usd=30_000,
        people_months=24,
        repeated_runs=2.0,
        evaluation_usd=5_000,
        stored_gb=20_000,
        storage_months=12,
    )
    project = project_cost(run, inputs)
    rest, large = project.usd - run * (1 + inputs.repeated_runs), training_usd(LLAMA_8B, 15e12)
    hardware = device("h100-sxm")
    hours = run / hardware.usd_per_hour.value
    bought, pue = bought_rate(hardware), pue_of(hardware)
    kwh, grid = energy_kwh(hours * 3600, hardware.watts.value, pue.value), price("grid_kg_co2_per_kwh")
    cases = (
        Case("run", "the final run: 8B on 160·10⁹ tokens (20 a parameter)", run, "usd", "training rent"),
        *(
            Case(name.replace(" ", "_"), name, value, "usd", "an input of the planner, assumed here")
            for name, value in project.items.items()
            if name != "final run" and value
        ),
        Case("share", "the final run's share of it all", run / project.usd, "share", "run ÷ sum"),
        Case("others", "what is no device's hour, of it all", rest / project.usd, "share", "all but runs ÷ sum"),
        Case("others_large", "the same for 8B on 15·10¹² tokens", rest / (rest + 3 * large), "share", "the same"),
        Case("kwh", f"energy of the final run at PUE {pue.value:g}: MWh", kwh / 1000, "count", "h·W·PUE"),
        Case(
            "co2", f"its CO₂ at {grid.value:g} kg a kWh: tonnes", co2_kg(kwh, grid.value) / 1000, "count", f"kWh·{grid.value:g}"
        ),
        Case("bought", "a bought H100: $ of an hour's work", bought.usd_per_hour.value, "usd", bought.usd_per_hour.source),
        Case(
            "boundary",
            "run that is half of this project",
            project.usd - run * (1 + inputs.repeated_runs),
            "usd",
            "everything that does not grow with the run",
        ),
    )
    return Claim(
        "hidden_costs",
        "Hidden costs of training",
        (
            f"{inputs.people_months:g} person-months, {inputs.repeated_runs:g} runs' worth of sweeps, "
            f"{(inputs.data_acquisition_usd + inputs.data_cleaning_usd) / 1e3:g} k$ of data: inputs, not truths",
        ),
        cases,
        (
            Figure(
                "people, data acquisition and cleaning",
                "at least half of it all",
                0.5,
                1,
                pick(cases, "others", "others_large"),
            ),
            Figure("repeated runs (sweeps, ablations)", "at least the final run", run, math.inf, pick(cases, "repeated_runs")),
            Figure("depreciation, energy, CO₂", "rent holds the first two", 0, 0, ()),
        ),
        f"runs are small: the final run is {100 * run / project.usd:.0f}% of this project, and people are most of it.",
        f"From runs of about {(project.usd - run * (1 + inputs.repeated_runs)) / 1e6:.2g} M$ on, the devices' hours are "
        "what counts. "
        "Rent already holds depreciation and energy: adding them to it counts them twice.",
        decided_by="twostroke plan train and plan crossover take each of them as an input",
    )


def networks() -> Claim:
    n, hardware = n_parameters(LLAMA_8B), device("h100-sxm")
    ranks = 64
    gradients = 2 * (ranks - 1) / ranks * 2 * n
    step = ring_all_reduce_s(2 * n, ranks, hardware.network)
    kv = kv_bytes_per_token(LLAMA_8B)
    plan = served("h100-sxm", LLAMA_8B, 32)
    rate = plan.output_tok_per_s / plan.shape.output_tokens
    text = 1500 * 4
    cases = (
        Case("batch", "a rank's batch: 8,192 token numbers", 8192 * 8 / 1e3, "kB", "8,192·8 bytes"),
        Case("gradients", "gradients a rank sends back, 64 ranks", gradients / GB, "GB", "2·63/64·2·N"),
        Case("ratio", "gradients over batch", gradients / (8192 * 8), "x", "sent ÷ received"),
        Case(
            "burst",
            "time of that burst between machines",
            step,
            "s",
            f"ring all-reduce at {hardware.network.bytes_per_s / 1e9:.3g} GB/s",
        ),
        Case("text", "text of one query and its answer", text / 1e3, "kB", "1,500 tokens of 4 bytes"),
        Case("kv", "KV of its 1,000 prompt tokens, if decoded elsewhere", 1000 * kv / GB, "GB", f"1,000·{kv:,.0f}"),
        Case("kv_ratio", "KV over text", 1000 * kv / text, "x", "KV ÷ text"),
        Case("kv_alone", "the same where one device computes the prompt and the answer", 0.0, "x", "no KV moves"),
        Case("text_rate", "text a busy server sends and receives a second", rate * text / 1e3, "kB", f"{rate:.2g} queries/s"),
        Case("kv_rate", "KV it would send a second", rate * 1000 * kv / GB, "GB", f"{rate:.2g} queries/s · KV"),
    )
    return Claim(
        "networks",
        "What crosses the network",
        ("Llama 3.1 8B in bf16; data parallel over 64 machines; prompt 1,000, output 500",),
        cases,
        (
            Figure(
                "training bursts in lockstep (batches out, gradients back)",
                "gradients over batch",
                1.01,
                math.inf,
                pick(cases, "ratio"),
            ),
            Figure(
                "inference follows requests; KV transfers dominate",
                "KV over text",
                1.01,
                math.inf,
                pick(cases, "kv_ratio", "kv_alone"),
            ),
        ),
        f"training has more than one rank: {cases[1].value:.3g} GB each step, all ranks at once, {cases[2].value:,.0f} "
        "times the batch. KV dominates "
        "inference where prefill and decode are apart, or prefixes are fetched.",
        f"A server by itself sends text: {rate * text / 1e3:.2g} kB a second. With prefill and decode on one "
        "device no KV moves; "
        "with tensor parallelism its all-reduces do.",
    )


SERVERS = ("h100-sxm", "h100-pcie", "l40s", "h200-sxm", "mi300x", "a100-sxm-80gb")


def hardware_to_buy() -> Claim:
    rich, plain = served("a100-sxm-80gb", LLAMA_8B, 32), served("a100-pcie-80gb", LLAMA_8B, 32)
    h100, l40s = served("h100-sxm", LLAMA_8B, 32), served("l40s", LLAMA_8B, 32)
    compute, memory = device("h100-sxm"), device("h200-sxm")
    more = served("h200-sxm", LLAMA_8B, 128).decode_tok_per_s / served("h100-sxm", LLAMA_8B, 128).decode_tok_per_s
    same = memory.peak("bf16") / compute.peak("bf16")
    break_even = plain.hardware.usd_per_hour.value * rich.output_tok_per_s / plain.output_tok_per_s
    cases = (
        Case("decode_gain", "H200 over H100: tokens a second of 128 requests", more, "x", "decode plans"),
        Case("bandwidth", "their memory bandwidth", memory.bandwidth(1e10) / compute.bandwidth(1e10), "x", "datasheets"),
        Case("arithmetic", "their bf16 rate", same, "x", "datasheets: training gains nothing there"),
        Case(
            "rich",
            "A100 with NVLink (SXM): output of 8B",
            rich.usd_per_mtok,
            "usd/Mtok",
            f"${rich.hardware.usd_per_hour.value:.3g} an hour",
        ),
        Case(
            "plain", "A100 without (PCIe)", plain.usd_per_mtok, "usd/Mtok", f"${plain.hardware.usd_per_hour.value:.3g} an hour"
        ),
        Case(
            "break_even",
            "what an hour of the first is worth at the second's price a token",
            break_even,
            "usd",
            "$/h · ratio of tokens/s",
        ),
        Case(
            "h100", "H100 SXM: output of 8B", h100.usd_per_mtok, "usd/Mtok", f"${h100.hardware.usd_per_hour.value:.3g} an hour"
        ),
        Case(
            "link_gain",
            "64 ranks' gradients of 8B at the network's rate over the fast link's",
            ring_all_reduce_s(2 * n_parameters(LLAMA_8B), 64, compute.network)
            / ring_all_reduce_s(2 * n_parameters(LLAMA_8B), 64, compute.link),
            "x",
            "ring all-reduces, H100's datasheet",
        ),
        Case(
            "rich_ratio", "price of a token, A100 SXM over PCIe", rich.usd_per_mtok / plain.usd_per_mtok, "x", "$/Mtok ÷ $/Mtok"
        ),
        Case("h100_ratio", "the same, H100 SXM over L40S", h100.usd_per_mtok / l40s.usd_per_mtok, "x", "the same"),
        Case("l40s", "L40S, no fast link", l40s.usd_per_mtok, "usd/Mtok", f"${l40s.hardware.usd_per_hour.value:.3g} an hour"),
    )
    excess = rich.hardware.usd_per_hour.value - break_even
    return Claim(
        "hardware_to_buy",
        "Which hardware for which phase",
        ("Llama 3.1 8B in bf16 on one device, 1,000 + 500 tokens, 32 requests, listed prices",),
        cases,
        (
            Figure(
                "training wants FLOPs and interconnect",
                "seconds of a step's gradients between machines over those in a node",
                1.01,
                math.inf,
                pick(cases, "link_gain"),
            ),
            Figure(
                "inference wants memory bandwidth and capacity",
                "tokens a second gained by bandwidth alone",
                1.1,
                math.inf,
                pick(cases, "decode_gain"),
            ),
            Figure(
                "buying interconnect for single-model inference is the common expensive mistake",
                "dearer a token with it",
                1.01,
                math.inf,
                pick(cases, "rich_ratio", "h100_ratio"),
            ),
        ),
        f"decode is what is bought: H200 has {cases[1].value:.2g}× the bandwidth and {same:.2g}× the arithmetic of H100, "
        "and decodes "
        f"{more:.2g}× as fast. On one device a fast link is unused: it makes the A100 with NVLink cost ${abs(excess):.2g} "
        "an hour "
        f"{'more' if excess > 0 else 'less'} than its tokens are worth beside the PCIe card.",
        "Devices with fast links mostly have faster memory too: an H100 costs "
        f"${h100.usd_per_mtok:.2g} per Mtok, an L40S ${l40s.usd_per_mtok:.2g}, so the link is no mistake by itself. A "
        "model that "
        "needs several devices uses the link in every layer.",
        decided_by="twostroke plan search MODEL --phase serve (why the losers lost)",
    )


INFERENCE_CHIPS = ("inferentia2", "tpu-v5e", "l4")


def inference_chips() -> Claim:
    base = served("h100-sxm", LLAMA_3B, 32)
    found = []
    for name in INFERENCE_CHIPS:
        try:
            plan = served(name, LLAMA_3B, 32)
        except CapacityError:
            continue
        found.append((name, plan))
    best_bandwidth = {
        name: device(name).bandwidth(1e10) * 3600 / device(name).usd_per_hour.value / 1e15
        for name in ("h100-sxm", *INFERENCE_CHIPS)
    }
    ratios = [base.usd_per_mtok / plan.usd_per_mtok for _, plan in found]
    best_name = max(best_bandwidth, key=lambda name: best_bandwidth[name] if name != "h100-sxm" else 0.0)
    cases = (
        Case(
            "h100", "H100 SXM: output of 3B", base.usd_per_mtok, "usd/Mtok", f"${base.hardware.usd_per_hour.value:.3g} an hour"
        ),
        *(
            Case(
                name,
                f"{plan.hardware.label}: the same",
                plan.usd_per_mtok,
                "usd/Mtok",
                f"${plan.hardware.usd_per_hour.value:.3g} an hour ({plan.hardware.usd_per_hour.kind}): "
                f"{base.usd_per_mtok / plan.usd_per_mtok:.2g}× better than H100",
            )
            for name, plan in found
        ),
        Case("best", "best of them over H100", max(ratios), "x", "$/Mtok ÷ $/Mtok"),
        Case(
            "bandwidth",
            f"petabytes read per $, {best_name} over H100",
            best_bandwidth[best_name] / best_bandwidth["h100-sxm"],
            "x",
            "β·3,600 ÷ $/h: the bound of decode",
        ),
        Case(
            "price_3x",
            "what an hour of Inferentia2 may cost to be 3× better",
            served("inferentia2", LLAMA_3B, 32).hardware.usd_per_hour.value
            * base.usd_per_mtok
            / served("inferentia2", LLAMA_3B, 32).usd_per_mtok
            / 3,
            "usd",
            "$/h · ratio ÷ 3",
        ),
    )
    return Claim(
        "inference_chips",
        "Inference-only chips",
        (
            "Llama 3.2 3B in bf16, 1,000 + 500 tokens, 32 requests, one device, never idle; prices as in the planner's table",
            "datasheet rates times the same shares for all, which favours new chips",
        ),
        cases,
        (Figure("3–10× better cost-efficiency", "times as cheap a token", 3, 10, pick(cases, "best")),),
        f"a chip reads three times the bytes per $: the best here reads {cases[-2].value:.2g}×."
        if max(ratios) >= 3
        else f"the price falls: Inferentia2 would be 3× better at ${cases[-1].value:.2g} an hour.",
        f"At these prices the best of them is {max(ratios):.2g}× as cheap a token as an H100, the worst "
        f"{min(ratios):.2g}×. Decode is "
        "bound by memory, and a byte a second costs about the same everywhere; claims of more compare full batches with single "
        "requests, or count list prices against rent.",
        decided_by="twostroke bench serve on the device itself",
    )
