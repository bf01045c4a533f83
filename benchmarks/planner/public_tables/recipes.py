"""What the public rows' launch scripts set beside an engine's defaults: the type of the cache, the tokens of a step, and when
prompts are taken.

InferenceX's are public: github.com/SemiAnalysisAI/InferenceX, benchmarks/ (70b_*_docker.sh bb4c7f9, 70b_*_trt_slurm.sh 73ef922
and a267b4b, 70b_fp8_h200_slurm.sh 409e9a4, 70b_fp8_h100_slurm.sh 2a205bb, dsr1_*.sh 1fc5d73, dsr1_*_trt_slurm.sh b5ebafa, and
under single_node/ dsr1_*_trt.sh 34bc7c4, dsr1_fp4_b200.sh 285b662, glm5_*.sh 4eca3fe, 405c601 and 0c82808, minimaxm2.5_*.sh
07e171a, 56245be and 34bc7c4). Other rows say nothing of theirs and get the engine's defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twostroke.planner.serving.policies import Policy, policy_of

WARMED_UP_SINCE = "2026-01-27"
"""InferenceX sends 2 · concurrency requests before it measures since its pull request 480 (opened ten days before, to be merged
after ten). Before, the first wave, a tenth of all requests, waited for what an engine compiles at first use."""
LATER = "1.2"
"""TensorRT-LLM's versions in the recipes of 2026."""


def cache_bytes(row: dict[str, str], precision: str) -> float:
    """Bytes of a cached element. fp8: under TensorRT-LLM with fp8 and fp4 checkpoints, in InferenceX's recipes of Llama-3.1-70B
    under vLLM, and on B200 (assumed of MiniMax-M2.5, whose recipes of those days were not found); else the model's bf16."""
    dense = row["model_path"].endswith("Llama-3.1-70B")
    fp8 = row["backend"] == "trtllm" or row["system"] == "b200_sxm" or (row["backend"] == "vllm" and dense)
    return 1.0 if fp8 and precision != "bf16" else 2.0


def policy_with_recipe(row: Any) -> Policy:
    """The engine's policy with what the recipe of ``row`` sets beside it."""
    policy = policy_of(row.engine)
    if not row.inference_x:
        return policy
    if row.engine == "trtllm":
        budget, taking = _trtllm(row)
    elif row.engine == "sglang":
        budget, taking = _sglang(row, policy.token_budget)
    else:
        return policy
    return replace(policy, token_budget=budget, taking=replace(policy.taking, **taking))


def _trtllm(row: Any) -> tuple[int, dict[str, Any]]:
    """(tokens of a step, when prompts are taken)."""
    chat, groups = (row.prompt, row.output) == (1024, 1024), row.at.attention_groups
    if row.dense:  # --max_num_tokens is the longest sequence but with fp8 on B200
        whole = row.precision == "fp8" and row.system == "b200_sxm"
        budget = 16384 if whole else row.prompt + row.output + 200
        return budget, {"hold_steps": 20, "hold_tokens": 0.9 * budget} if chat and row.tensor < 8 else {}
    budget = row.prompt + 64  # and room for a token of each that decodes: one prompt a step
    if row.version.startswith(LATER):
        budget = max(8192, row.batch + budget)
    if groups > 1:  # attention_dp_config: enable_balance, timeout_iters
        return budget, {"hold_steps": 60, "hold_prompts": groups}
    delayed = row.version.startswith(LATER) and row.precision == "fp8" and row.system == "b200_sxm"
    if delayed and chat and row.batch >= 64:
        return budget, {"hold_steps": 40, "hold_tokens": 0.8 * budget}
    return budget, {}


def _sglang(row: Any, default: int) -> tuple[int, dict[str, Any]]:
    looks = {"every": 30 if row.batch >= 16 else 10}
    if row.model == "GLM-5":
        if row.system != "b200_sxm":
            return default, {}
        return 32768, {"every": 10} if row.precision == "nvfp4" else {}
    if row.system != "b200_sxm":
        return 32768, {}
    if row.precision == "nvfp4":
        return 16384, looks
    return (32768, looks) if row.tensor == 8 else (8192, {"every": 10})
