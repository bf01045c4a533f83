"""Every number of a checkout that a change of its form must leave alone. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
ASSETS = Path(os.environ.get("TWOSTROKE_ASSETS", ROOT.parent / "shared" / "assets"))
DEVICES = ("this", "epyc-9654", "h100-sxm", "mi300x", "rtx-4090")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
SCHEMES = ("fp32", "bf16", "int8", "int8_weight_only", "int4", "head and cache in int8")
TRAINING = (
    "--optimizer adam --dtype fp32",
    "--optimizer sgd --checkpointing full --steps 100",
    "--optimizer muon --checkpointing selective --tokens 1e9",
    "--optimizer adamw8bit --logits whole --eager",
    "--dtype pure_bf16 --grad-accumulation 4",
    "--method lora --lora-rank 8",
    "--method lora --lora-targets q_proj,v_proj",
    "--method qlora",
    "--data-parallel 8 --zero 1",
    "--data-parallel 8 --zero 3",
    "--tensor 4 --data-parallel 2 --zero 2",
    "--tensor 4 --no-sequence-parallel",
    "--pipeline 4 --grad-accumulation 8",
    "--pipeline 4 --grad-accumulation 8 --interleave 2",
)
SERVING = (
    "--scheme fp32 --batch 1",
    "--scheme int8 --batch 32",
    "--scheme int8_weight_only",
    "--scheme int4",
    "--scheme int4-g32 --head-dtype int8 --kv-dtype int8",
    "--tensor 4 --batch 16",
    "--pipeline 4",
    "--prefix-hits 0.5 --prompt 2000 --output 100",
    "--speculate 4,0.7,0.1",
    "--rate 20 --slo-ttft-ms 500 --slo-tpot-ms 50",
    "--rate 20 --slo-ttft-ms 500 --slo-tpot-ms 50 --disaggregate",
    "--batch 64 --max-model-len 4096",
    "--explain",
)
PROMPTS = ("Once upon a time, there was a little girl named Lily.", "The big dog said to the cat:", "one two three one two")
RUNS: dict[str, dict[str, Any]] = {
    "full fp32": {"model": {"family": "llama"}, "train": {"dtype": "fp32"}},
    "full bf16, muon": {"model": {"family": "qwen3"}, "train": {"dtype": "bf16", "optimizer": "muon"}},
    "lora": {"method": "lora", "model": {"init_from": "llama"}, "train": {"dtype": "bf16"}},
    "qlora": {"method": "qlora", "model": {"init_from": "llama"}, "train": {"dtype": "bf16"}},
}


def questions(calibrated: bool) -> Iterator[list[str]]:
    """Command lines of `twostroke plan`, for five devices in turn."""
    configs = sorted((ASSETS / "configs" / "hf").glob("*.json"))
    devices = DEVICES if calibrated else DEVICES[1:]
    turn = 0
    for config in configs:
        for verb, rest in (("train", "--batch-size 4"), ("serve", ""), ("compare", "")):
            for _ in range(3):
                yield ["plan", verb, str(config), "--hardware", devices[turn % len(devices)], *rest.split()]
                turn += 1
    small = (
        "Qwen--Qwen3-0.6B_config.json",
        "meta-llama--Meta-Llama-3.1-8B_config.json",
        "mistralai--Mixtral-8x7B-v0.1_config.json",
    )
    for verb, options in (("train", TRAINING), ("serve", SERVING)):
        for option in options:
            for name in small:
                device = devices[turn % len(devices)]
                turn += 1
                yield ["plan", verb, str(ASSETS / "configs" / "hf" / name), "--hardware", device, *option.split()]
    for name in small[:2]:
        model = str(ASSETS / "configs" / "hf" / name)
        yield ["plan", "crossover", model, "--hardware", "h100-sxm", "--requests-per-day", "10000", "--tokens", "1e9"]
        yield ["plan", "search", model, "--hardware", "h100-sxm", "--hardware", "epyc-9654", "--top", "4"]
    if calibrated:
        for scheme in ("fp32", "bf16", "int8", "int8_weight_only", "int4"):
            for batch in ("1", "8"):
                model = str(ASSETS / "configs" / "hf" / small[0])
                yield ["plan", "serve", model, "--hardware", "this", "--scheme", scheme, "--batch", batch]


def asked(arguments: list[str]) -> Any:
    """The JSON answer of one command, in this process; of a refusal its exit code."""
    from twostroke.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*arguments, "--json"])
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    if code:
        print(f"exit code {code}: {' '.join(arguments)}: {err.getvalue().strip()[:200]}", file=sys.stderr)
    return json.loads(out.getvalue()) if code == 0 else f"exit code {code}"


def make_models(folder: Path) -> None:
    """A small random model of each family with a tokenizer of 512 tokens, whose parts all matter to what it says."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(PROMPTS * 10, trainer)
    common: dict[str, Any] = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1}
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
    configs = {
        "llama": transformers.LlamaConfig(**common, **shape),
        "mistral": transformers.MistralConfig(**common, **shape, sliding_window=24),
        "qwen2": transformers.Qwen2Config(**common, **shape),
        "qwen3": transformers.Qwen3Config(**common, **shape, head_dim=32, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(**common, n_embd=128, n_layer=3, n_head=4, n_positions=256),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape)
                if parameter.ndim == 2:
                    parameter.copy_(noise * (0.3 if "embed" in parameter_name or "wte" in parameter_name else 0.1))
                else:
                    parameter.copy_(0.1 * noise if parameter_name.endswith("bias") else 1 + 0.2 * noise)
        model.save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "generation_config.json").unlink(missing_ok=True)


def continuations(models: Path) -> dict[str, Any]:
    found = {}
    for family in FAMILIES:
        for scheme in SCHEMES:
            held = ["--head-dtype", "int8", "--kv-dtype", "int8"] if scheme not in SCHEMES[:-1] else ["--dtype", scheme]
            prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
            command = [
                "generate",
                str(models / family),
                *prompts,
                "--max-tokens",
                "48",
                "--temperature",
                "0",
                "--ignore-eos",
                *held,
            ]
            answer = asked(command)
            found[f"{family} {scheme}"] = answer if isinstance(answer, str) else texts_of(answer)
    return found


def texts_of(document: Any) -> list[str]:
    """Every text that was generated, wherever the document holds it."""
    if isinstance(document, dict):
        return [t for key, value in document.items() for t in ([value] if key == "text" else texts_of(value))]
    return [t for value in document for t in texts_of(value)] if isinstance(document, list) else []


def trainings(models: Path) -> dict[str, Any]:
    corpus = sorted(p for p in (ASSETS / "corpora").rglob("*.txt") if p.stat().st_size > 100_000)[0]
    found = {}
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = dict(run["model"])
            if "init_from" in model:
                model["init_from"] = str(models / str(model["init_from"]))
            else:
                model |= {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 160}
            data: dict[str, Any] = {"sources": [str(corpus)]}
            if "family" in model:
                data["vocab_size"] = 512
            train = {"steps": 6, "batch_size": 4, "sequence_length": 64, "compile": False} | run["train"]
            first = {"output": f"{folder}/out", "method": run.get("method", "pretrain")}
            recipe = {"": first, "model": model, "data": data, "train": train}
            lines = [
                f"{'' if not s else f'[{s}]'}\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in t.items())
                for s, t in recipe.items()
            ]
            (Path(folder) / "recipe.toml").write_text("\n".join(lines))
            answer = asked(["train", f"{folder}/recipe.toml"])
            summary = Path(folder) / "out" / "summary.json"
            found[name] = json.loads(summary.read_text())["weights_sha256"] if summary.exists() else answer
    return found


def record(models: Path, calibrated: bool) -> dict[str, Any]:
    if not (models / FAMILIES[-1] / "config.json").exists():
        make_models(models)
    short = str(ASSETS)
    plans = {" ".join(q).replace(short, "ASSETS"): asked(q) for q in questions(calibrated)}
    return {"plans": plans, "continuations": continuations(models), "weights": trainings(models)}


def leaves(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value, f"{path} › {key}" if path else key)
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from leaves(value, f"{path}[{i}]")
    else:
        yield path, document


def compare(before: Any, after: Any, shown: int) -> int:
    """Prints what differs; returns how many values do. Texts of plans are counted apart: words may change."""
    old, new = dict(leaves(before)), dict(leaves(after))
    absent = object()
    changed = [p for p in {**old, **new} if old.get(p, absent) != new.get(p, absent)]
    texts = [p for p in changed if p.startswith("plans") and all(_is_words(d.get(p)) for d in (old, new))]
    numbers = [p for p in changed if p not in set(texts)]
    for path in numbers[:shown]:
        print(f"{path}: {old.get(path, 'absent')} → {new.get(path, 'absent')}")
    if texts:
        print(f"{len(texts)} texts of plans differ, as {texts[0]}: {old[texts[0]]!r} → {new[texts[0]]!r}")
    counts = {part: len(before[part]) for part in before}
    print(f"{len(numbers)} of {len(old)} values differ ({counts})")
    kinds = sorted({re.sub(r"\[\d+\]", "", p.split(" › ", 2)[-1]) for p in numbers})
    print("\n".join(f"  {kind}" for kind in kinds[:shown]))
    return len(numbers)


def _is_words(value: Any) -> bool:
    """Whether a value is text that may change; an exit code is text that may not."""
    return isinstance(value, str) and not value.startswith("exit code")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="write what a checkout says")
    recording.add_argument("out", type=Path)
    recording.add_argument("--tree", type=Path, default=ROOT, help="the checkout; its native library must be built")
    recording.add_argument("--models", type=Path, required=True, help="folder of the small models, made if absent")
    recording.add_argument("--home", type=Path, help="a TWOSTROKE_HOME with a calibrated profile")
    recording.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    comparing = verbs.add_parser("compare", help="list what differs between two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--shown", type=int, default=60, help="most values that are listed")
    a = parser.parse_args()
    if a.verb == "compare":
        return int(compare(json.loads(a.before.read_text()), json.loads(a.after.read_text()), a.shown) > 0)
    if not a.inside:
        with tempfile.TemporaryDirectory() as scratch:
            home = Path(scratch)
            if a.home:
                subprocess.run(["cp", "-r", f"{a.home.resolve()}/profiles", scratch], check=True)
            environment = {**os.environ, "PYTHONPATH": str(a.tree.resolve() / "src"), "TWOSTROKE_HOME": str(home)}
            environment |= {"OMP_NUM_THREADS": "2", "TWOSTROKE_ASSETS": str(ASSETS), "HF_HUB_OFFLINE": "1"}
            environment |= {"TWOSTROKE_AS_CALIBRATED": "1"}
            return subprocess.run([sys.executable, str(HERE), *sys.argv[1:], "--inside"], env=environment).returncode
    out, models = a.out.resolve(), a.models.resolve()
    a.out.write_text(json.dumps(record(models, a.home is not None), indent=1) + "\n")
    print(f"{out} is of {Path(sys.modules['twostroke'].__file__ or '').parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
