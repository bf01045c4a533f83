"""A Hugging Face directory into OpenVINO's format, weights in bf16, int8 (per channel) or int4 (groups of 64, symmetric)."""

from __future__ import annotations

import sys


def main() -> None:
    source, target, variant = sys.argv[1:]
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    quantisation = {
        "bf16": None,
        "int8": OVWeightQuantizationConfig(bits=8, sym=True),
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=64),
    }[variant]
    options = {"load_in_8bit": False} if quantisation is None else {"quantization_config": quantisation}
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, **options)
    model.save_pretrained(target)


if __name__ == "__main__":
    main()
