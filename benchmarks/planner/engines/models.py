"""Model directories and recipes of the configurations, made when they are first asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from configurations import GGUF_PRECISIONS, ServingCase, Sizes, TrainingCase

SOURCE = "stdlib"
ADAPTED_STEPS = 4
"""So many that one is steady, which ``train_one.py`` asks for."""


def model_directory(sizes: Sizes, folder: Path) -> Path:
    """Random weights of ``sizes``, with a tokenizer of as many entries."""
    key = sha256(json.dumps(asdict(sizes), sort_keys=True).encode()).hexdigest()[:8]
    directory = folder / "models" / f"{sizes.name}-{key}"
    if not directory.is_dir():
        from twostroke.core.recipe import DataRecipe, ModelRecipe, spec_from_recipe
        from twostroke.data.prepare import prepare
        from twostroke.model.decoder import Decoder
        from twostroke.model.initialise import initialise
        from twostroke.model.save import save_model

        recipe = ModelRecipe(
            family=sizes.family, n_layers=sizes.n_layers, d_model=sizes.d_model, n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads, d_ff=sizes.feed_forward, max_positions=sizes.max_positions,
        )  # fmt: skip
        decoder = Decoder(spec_from_recipe(recipe, sizes.vocab_size, sizes.max_positions))
        initialise(decoder, 0)
        directory.parent.mkdir(parents=True, exist_ok=True)
        save_model(decoder, decoder.spec, directory, "bf16")
        data = prepare(DataRecipe(sources=(SOURCE,), vocab_size=sizes.vocab_size))
        shutil.copyfile(data.tokenizer_path, directory / "tokenizer.json")
    return directory


def served_directory(case: ServingCase, folder: Path, environment: dict[str, str]) -> Path:
    """What the engine opens: the model, a GGUF file of it whose matrices are kept, or adapters on it that a training of a few
    steps has made."""
    base = model_directory(case.sizes, folder)
    if case.scheme in GGUF_PRECISIONS:
        return _kept(base, GGUF_PRECISIONS[case.scheme])
    if not case.adapters:
        return base
    run = folder / "adapted" / base.name
    if not (run / "summary.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        recipe = recipe_of(TrainingCase(f"adapt-{base.name}", case.sizes, 2, 64, method="lora", compile=False), folder)
        script = Path(__file__).with_name("train_one.py")  # `twostroke train` would score the held-out text as well
        command = [sys.executable, str(script), str(recipe), f"train.steps={ADAPTED_STEPS}", f"output={run}"]
        subprocess.run(command, check=True, env=environment, capture_output=True)
    return run


def _kept(base: Path, precision: str) -> Path:
    directory = base.with_name(f"{base.name}-{precision}")
    if not directory.is_dir():
        from twostroke.interop.export_model import export_model
        from twostroke.interop.import_model import import_model

        file = directory.with_suffix(".gguf")
        export_model(base, file, to="gguf", precision=precision, replace=True)
        import_model(file, directory)
        file.unlink()
    return directory


def recipe_of(case: TrainingCase, folder: Path) -> Path:
    """The run as a recipe file."""
    sizes = case.sizes
    model: dict[str, Any] = {
        "family": sizes.family, "n_layers": sizes.n_layers, "d_model": sizes.d_model, "n_heads": sizes.n_heads,
        "n_kv_heads": sizes.n_kv_heads, "d_ff": sizes.feed_forward,
    }  # fmt: skip
    data: dict[str, Any] = {"sources": [SOURCE], "vocab_size": sizes.vocab_size}
    if case.method != "pretrain":
        directory = str(model_directory(sizes, folder))
        model, data["tokenizer"] = {"init_from": directory}, directory
    train = {
        "steps": 1, "batch_size": case.batch_size, "sequence_length": case.sequence_length, "compile": case.compile,
        "grad_accumulation": case.grad_accumulation, "dtype": case.dtype, "optimizer": case.optimizer,
        "activation_checkpointing": case.recomputation,
    }  # fmt: skip
    lines = [f"method = {json.dumps(case.method)}", f"output = {json.dumps(str(folder / 'runs' / case.name))}"]
    lora = {"targets": case.targets} if case.method.endswith("lora") else {}
    for name, table in (("model", model), ("data", data), ("lora", lora), ("train", train)):
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path = folder / f"{case.name}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
