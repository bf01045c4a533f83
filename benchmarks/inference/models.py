"""The models that are timed: random weights of a shape, written once in each engine's format."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cases import MAX_POSITIONS, Shape
from safetensors.torch import save_file

from twostroke.core.families import layout, spec_from_config

HERE = Path(__file__).parent


def write_model(shape: Shape, directory: Path) -> Path:
    """A Hugging Face directory of bf16 weights, σ = 0.02."""
    directory.mkdir(parents=True, exist_ok=True)
    if not _says(directory, shape.config()):
        (directory / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")
    if (directory / "model.safetensors").is_file():
        return directory
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for entry in layout(spec_from_config(shape.config())):
        for part in entry.parts:
            size = entry.stored_shape(part)
            tensors[part.name] = torch.ones(size) if len(size) == 1 else torch.randn(*size, generator=generator) * 0.02
            tensors[part.name] = tensors[part.name].bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _says(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether the directory's ``config.json`` holds all of ``config``."""
    file = directory / "config.json"
    return file.is_file() and config.items() <= json.loads(file.read_text(encoding="utf-8")).items()


def model_for(engine: str, variant: str, source: Path, folder: Path, pythons: Mapping[str, str]) -> Path:
    """What ``engine`` reads, made from ``source`` by the engine's own tools where it is not there yet."""
    if engine == "llama.cpp":
        kind = variant.removesuffix("-plain")
        target, command = folder / f"{source.name}-{kind}.gguf", [pythons[engine], str(HERE / "engines" / "convert_gguf.py")]
    elif engine == "openvino":
        kind = variant
        target, command = (
            folder / f"{source.name}-openvino-{kind}",
            [pythons[engine], str(HERE / "engines" / "convert_openvino.py")],
        )
    elif variant == "w8a8" or (engine == "twostroke" and variant != "bf16"):
        scheme = "int4" if variant.startswith("int4") else "int8"
        target = folder / f"{source.name}-{scheme}"
        if not _says(target, {"max_position_embeddings": MAX_POSITIONS}):
            shutil.rmtree(target, ignore_errors=True)  # made for another benchmark, or half
            own = [pythons["twostroke"], "-m", "twostroke", "quantize", str(source), str(target), "--scheme", scheme]
            subprocess.run([*own, *(["--rounding", "nearest"] if scheme == "int4" else [])], check=True)
        return target
    else:
        return source
    if not target.exists():
        subprocess.run([*command, str(source), str(target), kind], check=True)
    return target
