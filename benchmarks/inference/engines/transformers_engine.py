"""transformers' ``generate``. ``variant``: bf16."""

from __future__ import annotations

import torch
from protocol import Bench, arguments, timed


def main() -> None:
    args = arguments()
    bench = Bench(args)
    torch.set_num_threads(2)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], n_output: int) -> float:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            return timed(
                lambda: model.generate(
                    ids, attention_mask=mask, do_sample=False, min_new_tokens=n_output, max_new_tokens=n_output
                )
            )

    bench.first_token(generate)
    bench.run(generate)


if __name__ == "__main__":
    main()
