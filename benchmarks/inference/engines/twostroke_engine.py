"""Our engine. ``variant``: bf16; or int8 and int4, directories of ``twostroke quantize``; with ``-head8`` the output head,
which the directory holds in bf16, is in int8 as well."""

from __future__ import annotations

from protocol import Bench, arguments, timed

from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams


def main() -> None:
    args = arguments()
    bench = Bench(args)
    scheme, _, head = args.variant.partition("-")
    llm = LLM(args.model, dtype=scheme, max_model_len=1024, head_dtype="int8" if head else "auto")

    def generate(prompts: list[list[int]], n_output: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True)
        return timed(lambda: llm.generate(prompts, params))

    bench.first_token(generate)
    bench.run(generate)
    bench.record("weights_bytes", llm.engine.weights_bytes)


if __name__ == "__main__":
    main()
