"""OpenVINO through optimum-intel, from a directory that ``convert_openvino.py`` wrote. ``variant``: bf16, int8, int4."""

from __future__ import annotations

import torch
from protocol import Bench, arguments, timed


def main() -> None:
    args = arguments()
    bench = Bench(args)
    from optimum.intel import OVModelForCausalLM

    settings = {"INFERENCE_NUM_THREADS": "2", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16"}
    model = OVModelForCausalLM.from_pretrained(args.model, ov_config=settings)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], n_output: int) -> float:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        return timed(
            lambda: model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=n_output, max_new_tokens=n_output)
        )

    bench.first_token(generate)
    bench.run(generate)


if __name__ == "__main__":
    main()
