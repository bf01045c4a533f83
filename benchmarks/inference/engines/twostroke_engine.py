"""Our engine. ``variant`` is how weights are held: bf16, int8, int4 …"""

from __future__ import annotations

from protocol import Bench, arguments, timed

from twostroke.engine.llm import LLM
from twostroke.scheduling.sampling_params import SamplingParams


def main() -> None:
    args = arguments()
    bench = Bench(args)
    llm = LLM(args.model, dtype=args.variant, max_model_len=1024)

    def generate(prompts: list[list[int]], n_output: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True)
        return timed(lambda: llm.generate(prompts, params))

    bench.first_token(generate)
    bench.run(generate)
    bench.record("weights_bytes", llm.engine.weights_bytes)


if __name__ == "__main__":
    main()
