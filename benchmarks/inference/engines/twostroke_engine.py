"""Our engine. ``variant``: bf16; or int8 and int4, directories of ``twostroke quantize``; with ``-head8`` or
``-head4`` the output head, which the directory holds in bf16, is in int8 or int4 as well, with ``-kv8`` the KV cache in int8.

Beside what every engine measures, from the engine's own statistics: the share of the bandwidth limit, the time beyond the
products, what a prefix hit and a long context cost, and memory against its bound."""

from __future__ import annotations

import statistics

from protocol import OUTPUT_TOKENS, PROMPT_TOKENS, Bench, arguments, timed
from twostroke_products import products_seconds

from twostroke.calibration.native_rates import read_bytes_per_s
from twostroke.core.families import read_spec
from twostroke.engine.achieved import PhaseRates, achieved
from twostroke.engine.kv_pool import token_bytes
from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams

CACHE_TOKENS = 12_288
"""What the KV cache holds: two and a half times the longest context; prompts never repeat, so it fills up."""

HEADS = {"head8": "int8", "head4": "int4"}

SHARED_TOKENS, LONG_TOKENS = 2000, 4096


def main() -> None:
    args = arguments()
    bench = Bench(args)
    scheme, *rest = args.variant.split("-")
    kv_dtype = "int8" if "kv8" in rest else "bf16"
    spec = read_spec(args.model)
    llm = LLM(
        args.model,
        dtype=scheme,
        max_model_len=min(LONG_TOKENS + OUTPUT_TOKENS, spec.max_positions),
        kv_cache_bytes=token_bytes(spec, kv_dtype) * CACHE_TOKENS,
        head_dtype=next((dtype for name, dtype in HEADS.items() if name in rest), "auto"),
        kv_dtype=kv_dtype,
    )

    def generate(prompts: list[list[int]], n_output: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True)
        return timed(lambda: llm.generate(prompts, params))

    bench.first_token(generate)
    engine = llm.engine
    bench.record("packed_was_read", engine.loaded_packed)
    if args.start_only:
        return
    bench.record("weights_bytes", engine.weights_bytes)
    bench.record("kv_cache_bytes", engine.kv_cache_bytes)
    bench.run(generate)

    prefix_shares = []
    for _ in range(args.repeats):
        prompt = bench.prompts(1, SHARED_TOKENS)
        cold = generate(prompt, 1)
        prefix_shares.append(generate(prompt, 1) / cold)
    bench.record("prefix_hit_share", prefix_shares)

    if llm.engine.max_model_len >= LONG_TOKENS + OUTPUT_TOKENS:
        prompt, rates = bench.prompts(1, LONG_TOKENS - OUTPUT_TOKENS // 2), []
        generate(prompt, 1)
        for _ in range(args.repeats):
            before = llm.stats()
            generate(prompt, OUTPUT_TOKENS)
            rates.append(achieved(engine, since=before).decode.tok_per_s)
        bench.record(f"context_{LONG_TOKENS}_tok_per_s", rates)

    def decoded() -> PhaseRates:
        before = llm.stats()
        generate(bench.prompts(1, PROMPT_TOKENS), OUTPUT_TOKENS + 1)
        return achieved(engine, since=before).decode

    shares, beyond, step_bytes = [], [], decoded().bytes_per_step
    for _ in range(args.repeats):
        limits = [read_bytes_per_s(step_bytes)]  # beside each: neighbours of the machine change it within seconds
        decode = decoded()
        products = products_seconds(engine.plan, engine.n_threads)
        limits.append(read_bytes_per_s(step_bytes))
        if None not in limits:
            shares.append(decode.bytes_per_s / statistics.mean(limits))
        if products is not None:
            beyond.append(decode.seconds / decode.steps / products - 1)
    if shares:
        bench.record("decode_1_read_share", shares)
    if beyond:
        bench.record("decode_1_beyond_products", beyond)


if __name__ == "__main__":
    main()
