"""vLLM's CPU build. ``variant``: bf16, or w8a8 for a directory in compressed-tensors' format."""

from __future__ import annotations

from protocol import Bench, arguments, timed


def main() -> None:
    args = arguments()
    bench = Bench(args)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=max(args.batches),
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], n_output: int) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=n_output, min_tokens=n_output, ignore_eos=True, detokenize=False, stop_token_ids=[]
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return timed(lambda: llm.generate(inputs, params, use_tqdm=False))

    bench.first_token(generate)
    bench.run(generate)


if __name__ == "__main__":
    main()
