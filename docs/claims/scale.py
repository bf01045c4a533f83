"""Claims on what large runs and large services take, over their lifetime."""

from __future__ import annotations

import math
from functools import lru_cache

from claims.claim import Case, Claim, Figure, pick
from claims.money import MFU, UTILISATION, query_usd, served, training_usd
from claims.runs import http_tails, tails
from claims.subjects import DEVICE, GB, LLAMA_2_7B, LLAMA_8B, LLAMA_70B, LLAMA_405B, device, n_parameters
from claims.work import serving
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.tables import price
from twostroke.planner.money.cost import co2_kg, energy_kwh, pue_of
from twostroke.planner.serving.drawn import Lognormal
from twostroke.planner.serving.plan import ServingPlan, plan_serving, strategy_of
from twostroke.planner.serving.policies import policy_of
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.simulation import Simulated, simulate
from twostroke.planner.serving.step_table import StepTable
from twostroke.planner.serving.strategy import GPU_MEMORY_UTILISATION
from twostroke.planner.serving.workload import Workload
from twostroke.planner.work.flops import training_flops_per_token
from twostroke.planner.work.weights import kv_bytes_per_token, weights_bytes

BATCH_TOKENS = {"8B": 4e6, "405B": 16e6}
"""Tokens of an optimizer step: Llama 3 8B begins with 4 M, 405B ends with 16 M (arXiv 2407.21783, section 3.4)."""


def run_days(spec: ModelSpec, tokens: float, n_devices: int, name: str = DEVICE) -> float:
    """D·(FLOP a token) ÷ (n·π·MFU), in days."""
    return tokens * training_flops_per_token(spec, 8192) / (device(name).peak("bf16") * MFU * n_devices) / 86400


def frontier_run() -> Claim:
    cases = (
        Case(
            "days_405b", "405B on 15.6·10¹² tokens, 16,384 H100", run_days(LLAMA_405B, 15.6e12, 16384), "days", f"MFU {MFU:g}"
        ),
        Case("days_70b", "70B on 15·10¹² tokens, 4,096 H100", run_days(LLAMA_70B, 15e12, 4096), "days", "the same"),
        Case("days_8b", "8B on 15·10¹² tokens, 512 H100", run_days(LLAMA_8B, 15e12, 512), "days", "the same"),
        Case("steps_405b", "steps of 16 M tokens, 405B", 15.6e12 / BATCH_TOKENS["405B"], "count", "D ÷ batch"),
        Case("steps_8b", "steps of 4 M tokens, 8B", 15e12 / BATCH_TOKENS["8B"], "count", "D ÷ batch"),
    )
    return Claim(
        "frontier_run",
        "How long a frontier run takes",
        (f"H100 SXM, {100 * MFU:.0f}% MFU assumed, no failures; tokens and batches as Llama 3 was trained",),
        cases,
        (
            Figure("2 to 4 months of wall clock", "days", 60, 122, pick(cases, "days_405b", "days_70b", "days_8b")),
            Figure("millions of steps", "at least one million", 1e6, math.inf, pick(cases, "steps_405b", "steps_8b")),
        ),
        f"devices are bought so that it does: 405B takes {cases[0].value:.0f} days on 16,384.",
        f"Millions of steps need small batches: with 4 to 16 M tokens each these runs take {cases[3].value / 1e6:.2g} to "
        f"{cases[4].value / 1e6:.2g} million.",
        decided_by="twostroke plan train MODEL --tokens N --devices N (days with failures)",
    )


def seven_billion_devices() -> Claim:
    n, memory = n_parameters(LLAMA_2_7B), 24 * 2**30
    a100 = device("a100-sxm-80gb")
    days = 2e12 * training_flops_per_token(LLAMA_2_7B, 4096) / (a100.peak("bf16") * MFU * 256) / 86400
    one = days * 256
    kv = 4096 * kv_bytes_per_token(LLAMA_2_7B)

    def largest_billions(bits: float) -> float:
        """Parameters at ``bits`` that fill the card but for one request's cache."""
        return 8 * (GPU_MEMORY_UTILISATION * memory - kv) / bits / 1e9

    cases = (
        Case("days_256", "Llama 2 7B on 2·10¹² tokens, 256 A100", days, "days", f"D·FLOP ÷ (256·π·{MFU:g})"),
        Case("days_8", "the same on 8", one / 8, "days", "the same"),
        Case("weights", "its weights in 16 bits", weights_bytes(LLAMA_2_7B, "bf16") / GB, "GB", f"2·{n:,}"),
        Case("with_kv", "with a request of 4,096 tokens", (weights_bytes(LLAMA_2_7B, "bf16") + kv) / GB, "GB", "weights + KV"),
        Case(
            "bf16",
            "largest model on a 24 GB card in 16 bits, billions",
            largest_billions(16),
            "count",
            "8·(0.9·24 GiB − KV) ÷ 16",
        ),
        Case("int8", "the same in 8 bits", largest_billions(8.2), "count", "8.2 bits with scales"),
        Case("int4", "the same in 4 bits", largest_billions(4.5), "count", "4.5 bits with scales"),
    )
    return Claim(
        "seven_billion_devices",
        "Devices to train 7B and to run it",
        (f"A100 SXM 80 GB, {100 * MFU:.0f}% MFU assumed; Llama 2 7B, 2·10¹² tokens; a 24 GB card",),
        cases,
        (
            Figure("256 A100 to train", "days at most a month and a half", 0, 45, pick(cases, "days_256", "days_8")),
            Figure(
                "one consumer card to run", "GB that fit 24 GiB at 90%", 0, 0.9 * memory / GB, pick(cases, "weights", "with_kv")
            ),
        ),
        f"time is what the devices buy: {days:.0f} days on 256 (published: 184,320 A100-hours, 30 days), "
        f"{one / 8 / 365:.2g} years "
        "on eight, which hold it as well.",
        f"The card's limit is bits: {cases[4].value:.0f}·10⁹ parameters in 16, "
        f"{cases[5].value:.0f} in 8, {cases[6].value:.0f} in "
        "4, each with one request of 4,096 tokens.",
        decided_by="twostroke plan train and twostroke plan serve",
    )


QUERIES_A_DAY = 1e9
"""Of an assistant with hundreds of millions of users: some queries each."""


def assistant_day() -> Claim:
    small, large = served("h100-sxm", LLAMA_8B, 32), served("mi300x", LLAMA_70B, 16)
    days = {name: QUERIES_A_DAY * query_usd(plan) for name, plan in (("8b", small), ("70b", large))}
    busy = QUERIES_A_DAY * query_usd(small, utilisation=1.0)
    cases = (
        Case("day_8b", "10⁹ queries a day to 8B", days["8b"], "usd", f"$ a query, busy {100 * UTILISATION:g}% of the time"),
        Case("day_70b", "10⁹ queries a day to 70B", days["70b"], "usd", "the same, one MI300X a copy"),
        Case("day_8b_busy", "8B, machines always busy", busy, "usd", "the same"),
        Case("year_8b", "8B, a year of it", 365 * days["8b"], "usd", "365 days"),
    )
    return Claim(
        "assistant_day",
        "What a large assistant costs a day",
        ("10⁹ queries of 1,000 + 500 tokens a day; rent at listed prices",),
        cases,
        (
            Figure(
                "several 100,000 $ a day with hundreds of millions of users",
                "dollars",
                1e5,
                1e6,
                pick(cases, "day_8b", "day_70b", "day_8b_busy"),
            ),
        ),
        f"the model is small: {days['8b'] / 1e3:,.0f} k$ a day for 8B, {busy / 1e3:,.0f} k$ if its machines are always busy.",
        f"70B costs {days['70b'] / 1e6:.2g} M$ a day. The price of a query and their number are the answer; both "
        "span a factor of "
        "ten.",
        decided_by="twostroke plan crossover",
    )


def carbon() -> Claim:
    grid, hardware = price("grid_kg_co2_per_kwh"), device(DEVICE)
    pue = pue_of(hardware).value

    def tonnes(device_hours: float) -> float:
        return co2_kg(energy_kwh(device_hours * 3600, hardware.watts.value, pue), grid.value) / 1000

    hours = {
        name: 24 * n * run_days(spec, tokens, n)
        for name, spec, tokens, n in (
            ("8b", LLAMA_8B, 15e12, 512),
            ("70b", LLAMA_70B, 15e12, 4096),
            ("405b", LLAMA_405B, 15.6e12, 16384),
        )
    }
    how = f"device-hours · W · PUE {pue:g} · {grid.value:g} kg a kWh"
    cases = tuple(Case(name, f"{name.upper()}: tonnes of CO₂", tonnes(h), "count", how) for name, h in hours.items())
    return Claim(
        "carbon",
        "CO₂ of a training run",
        (f"15·10¹² tokens (405B: 15.6), {100 * MFU:.0f}% MFU, the planner's grid and power, final run only",),
        cases,
        (Figure("hundreds of tons of CO₂", "tonnes", 100, 1000, cases),),
        f"the model has some 8·10⁹ parameters: {cases[0].value:,.0f} tonnes.",
        f"70B emits {cases[1].value:,.0f} tonnes and 405B {cases[2].value:,.0f} on this grid; a grid of 0.05 kg "
        "a kWh makes that "
        f"{0.05 / grid.value:.0%} of it.",
        decided_by="twostroke plan train MODEL --tokens N (energy and CO₂)",
    )


def tenth_of_serving() -> Claim:
    small, large = query_usd(served("h100-sxm", LLAMA_8B, 32)), query_usd(served("mi300x", LLAMA_70B, 16))
    cases = (
        Case("million", "10% of a year of 10⁶ queries a day, 8B", 0.1 * 365 * 1e6 * small, "usd", "0.1·365·10⁶·$ a query"),
        Case("hundred_million", "10% of a year of 10⁸ queries a day, 8B", 0.1 * 365 * 1e8 * small, "usd", "the same"),
        Case("hundred_million_70b", "the same, 70B", 0.1 * 365 * 1e8 * large, "usd", "the same"),
        Case(
            "boundary",
            "8B: queries a day from which it is a million dollars",
            1e6 / (36.5 * small),
            "requests",
            "10⁶ ÷ (36.5·$)",
        ),
        Case("boundary_70b", "70B: the same", 1e6 / (36.5 * large), "requests", "the same"),
    )
    return Claim(
        "tenth_of_serving",
        "What a tenth of serving is worth",
        (f"1,000 + 500 tokens a query, rent at listed prices, busy {100 * UTILISATION:g}% of the time",),
        cases,
        (
            Figure(
                "every 10% saved in serving is worth millions a year",
                "at least 1 M$",
                1e6,
                math.inf,
                pick(cases, "million", "hundred_million", "hundred_million_70b"),
            ),
        ),
        f"there are {cases[3].value / 1e6:,.0f} M queries a day to 8B, or {cases[4].value / 1e6:,.0f} M to 70B.",
        f"At a million a day it is {cases[0].value / 1e3:,.0f} k$.",
        decided_by="twostroke plan crossover (the worth of a saved share)",
    )


def lifetime() -> Claim:
    a_query, run = query_usd(served("h100-sxm", LLAMA_8B, 32)), training_usd(LLAMA_8B, 15e12)
    years = 3.0

    def ratio(queries_a_day: float, usd: float = run) -> float:
        return years * 365 * queries_a_day * a_query / usd

    fine = training_usd(LLAMA_8B, 1e8, sequence_length=2048)
    cases = (
        Case("million", "8B from nothing, 10⁶ queries a day for 3 years", ratio(1e6), "x", "serving ÷ training"),
        Case("hundred_million", "the same, 10⁸ queries a day", ratio(1e8), "x", "the same"),
        Case("billion", "the same, 10⁹ queries a day", ratio(1e9), "x", "the same"),
        Case("fine_tuned", "fine-tuned on 10⁸ tokens, 10⁴ queries a day", ratio(1e4, fine), "x", "the same"),
        Case(
            "ten_times",
            "queries a day that make it ten times, from nothing",
            10 * run / (years * 365 * a_query),
            "requests",
            "10·run ÷ (days·$)",
        ),
    )
    return Claim(
        "lifetime",
        "Serving over training in a lifetime",
        ("8B on 15·10¹² tokens; three years; the final run alone counts as training",),
        cases,
        (
            Figure(
                "serving costs orders of magnitude more over a lifetime",
                "at least ten times",
                10,
                math.inf,
                pick(cases, "million", "hundred_million", "billion", "fine_tuned"),
            ),
        ),
        f"from {cases[4].value / 1e6:,.0f} M queries a day on, and for what is fine-tuned almost always.",
        f"At a million a day serving costs {cases[0].value:.2g}× the run: training is the larger bill.",
        decided_by="twostroke plan crossover",
    )


# -- tails ----------------------------------------------------------------------------------------------------------------


def _under_load(share: float) -> Simulated:
    """8B on one H100 with vLLM's rules, Poisson arrivals at ``share`` of what a full batch answers, lognormal lengths."""
    full = serving(batch=64)
    rate = share * full.output_tok_per_s / full.shape.output_tokens
    seconds = StepTable(strategy_of(LLAMA_8B, full.shape, full.hardware).step_seconds)
    workload = Workload.open(rate, 1500, Lognormal(800, 0.7, 4096), Lognormal(200, 0.7, 1024), warmup=100, seed=1)
    return simulate(workload, policy_of("vllm"), seconds, full.pages)


def tail_latency() -> Claim:
    calm, busy = _under_load(0.3), _under_load(0.8)
    measured = (*tails(), *http_tails("ttft", "first token"), *http_tails("itl", "gap between tokens"))
    cases = (
        Case(
            "ttft_calm",
            "p99 over median TTFT at 30% of the largest rate",
            calm.ttft_s.p99 / calm.ttft_s.median,
            "x",
            "simulated",
        ),
        Case("ttft_busy", "the same at 80%", busy.ttft_s.p99 / busy.ttft_s.median, "x", "simulated"),
        Case("tpot_calm", "p99 over median TPOT at 30%", calm.tpot_s.p99 / calm.tpot_s.median, "x", "simulated"),
        Case("tpot_busy", "the same at 80%", busy.tpot_s.p99 / busy.tpot_s.median, "x", "simulated"),
        Case("e2e_busy", "p99 over median answer at 80%", busy.e2e_s.p99 / busy.e2e_s.median, "x", "simulated"),
    )
    return Claim(
        "tail_latency",
        "The 99th percentile",
        (
            "Llama 3.1 8B on one H100 SXM, vLLM's rules, Poisson arrivals",
            "lognormal prompts and answers, medians 800 and 200 tokens, σ 0.7",
            "the share is of what 64 requests at once are answered at",
        ),
        cases,
        (
            Figure(
                "p99 must stay within bounds, not only the median",
                "p99 at least 1.5 times the median",
                1.5,
                math.inf,
                (*cases, *measured),
            ),
        ),
        f"lengths differ and requests wait: the slowest hundredth of first tokens takes {cases[1].value:.2g}× the median "
        "at 80% load.",
        f"Between tokens the two are near each other ({cases[2].value:.2g}× and {cases[3].value:.2g}×): a step is "
        "the same for all "
        "that are in it.",
        decided_by="twostroke bench serve (p90, p95 and p99 of each latency)",
        measured=measured,
    )


# -- cards ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _on_cards(tensor: int) -> ServingPlan:
    shape = ServingShape(batch=16, prompt_tokens=1024, output_tokens=256, tensor=tensor)
    return plan_serving(LLAMA_70B, shape, device(DEVICE))


def serving_cards() -> Claim:
    kv, weights = kv_bytes_per_token(LLAMA_70B), weights_bytes(LLAMA_70B, "bf16")
    plans = {n: _on_cards(n) for n in (4, 8)}
    four_bits = weights_bytes(LLAMA_70B, "int4")
    cases = (
        Case(
            "hold",
            "80 GB cards that hold the weights in 16 bits",
            float(math.ceil(weights / (0.9 * 80e9))),
            "count",
            "⌈2·N ÷ (0.9·80 GB)⌉",
        ),
        *(
            Case(
                f"kv_{n}",
                f"requests of 8,192 tokens that {n} cards hold beside them",
                (0.9 * n * 80e9 - weights) / (8192 * kv),
                "requests",
                f"(0.9·{n}·80 GB − 2·N) ÷ KV",
            )
            for n in (2, 4, 8)
        ),
        *(
            Case(f"tpot_{n}", f"time between tokens on {n} H100, 16 requests", 1e3 * plan.tpot_s, "ms", "decode plan")
            for n, plan in plans.items()
        ),
        Case("int4", "weights in 4 bits", four_bits / GB, "GB", "scheme int4 of the planner"),
        Case("consumer", "memory of an RTX 5090", device("rtx-5090").memory_bytes / GB, "GB", "datasheet"),
    )
    return Claim(
        "serving_cards",
        "Cards for 70B",
        ("Llama 3.1 70B; KV in bf16; tensor parallel over H100 SXM",),
        cases,
        (
            Figure("eight 80 GB cards in 16 bits", "cards that hold the weights", 8, 8, pick(cases, "hold")),
            Figure("one consumer card in 4 bits", "GB, at most its memory", 0, cases[-1].value, pick(cases, "int4")),
        ),
        f"eight are for time and KV: {1e3 * plans[8].tpot_s:.2g} ms a token against {1e3 * plans[4].tpot_s:.2g} on four, and "
        f"{cases[3].value:.0f} requests of 8,192 tokens.",
        f"{cases[0].value:.0f} hold the weights, with room for {cases[1].value:.0f} such request; no consumer card holds "
        f"{cases[-2].value:.3g} GB.",
        decided_by="twostroke plan search llama-3.1-70b --phase serve",
    )
