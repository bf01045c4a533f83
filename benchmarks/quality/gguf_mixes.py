"""Perplexity of our GGUF files beside llama.cpp's own of the same model, in the same program. See README.md."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from run import windows_of

from twostroke.core.families import read_spec
from twostroke.core.families.weights import tensors
from twostroke.interop.export_model import export_model
from twostroke.interop.gguf_families import family_row
from twostroke.interop.gguf_mixes import PRECISIONS, WEIGHED
from twostroke.interop.gguf_model import read_gguf
from twostroke.model.decoder import Decoder
from twostroke.model.load import filled, load_model
from twostroke.quantization.calibration_text import calibration_batches
from twostroke.quantization.importance import mean_squares

HERE = Path(__file__).parent
LIMIT = 1.01
"""The greatest ratio of our file's perplexity to that of llama.cpp's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="output of a training run, or a model directory with --data")
    parser.add_argument("--llama", type=Path, required=True, help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--precisions", nargs="*", default=["Q4_K_M"], choices=WEIGHED)
    parser.add_argument("--data", nargs="*", default=[], help="text to score; default: what the model's run held out")
    parser.add_argument("--calibration", nargs="*", default=[], help="text of the importance; default: what the run trained on")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--exact-windows", type=int, default=48, help="of them, scored in fp32 as well")
    parser.add_argument("--name", help="of the model, in the record; default: its folder's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = args.model / "model" if (args.model / "model" / "config.json").is_file() else args.model
    windows = np.asarray(windows_of(model, args.data, args.length, args.windows))
    conditions = recorded.conditions()
    with tempfile.TemporaryDirectory() as name:
        document = conditions | measure(model, Path(name), windows, args)
    recorded.write(args.out, {"raw.json": document, "summary.md": table(document)})
    print(table(document))


@dataclass(frozen=True)
class Made:
    """A file: its precision, who quantised it, whether by importance."""

    precision: str
    quantised_by: str
    weighed: bool
    path: Path


def measure(model: Path, folder: Path, windows: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    """Both programs quantise the numbers of one F32 file, with the same importance and without; llama.cpp scores all files."""
    batches = calibration_batches(model, read_spec(model), args.calibration)
    importance = mean_squares(load_model(model), batches)
    plain, means = folder / "F32.gguf", folder / "importance.npz"
    export_model(model, plain, precision="F32", to="gguf")
    np.savez(means, **by_tensor(model, importance))
    files, wanted = [Made("F32", "", False, plain)], []
    for precision in args.precisions:
        for weighed in (False, True):
            ours, theirs = (folder / f"{precision}-{weighed}-{whose}.gguf" for whose in ("ours", "theirs"))
            export_model(model, ours, precision=precision, to="gguf", measure=lambda _: importance if weighed else None)  # noqa: B023
            wanted.append(
                {"to": str(theirs), "type": PRECISIONS[precision].number, "importance": str(means) if weighed else None}
            )
            files += [Made(precision, "Twostroke", weighed, ours), Made(precision, "llama.cpp", weighed, theirs)]
    np.save(folder / "windows.npy", windows)
    request = {
        "source": str(plain), "quantise": wanted, "windows": str(folder / "windows.npy"), "files": [str(f.path) for f in files],
    }  # fmt: skip
    command = [str(args.llama), str(HERE / "llama_cpp_peer.py"), json.dumps(request)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return document_of(files, found, windows, sum(batch.numel() for batch in batches), args)


def document_of(
    files: list[Made], found: dict[str, Any], windows: np.ndarray, importance_tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The record of ``files`` and of what llama.cpp ``found`` of them; their numbers are scored here."""
    spread = np.linspace(0, len(windows) - 1, min(args.exact_windows, len(windows))).astype(int)
    exact = exact_scores([file.path for file in files], windows[spread])
    rows = [
        {
            "precision": file.precision, "quantised_by": file.quantised_by, "importance": file.weighed,
            "bytes": file.path.stat().st_size, "in_llama_cpp": scores, "in_fp32": own,
        }
        for file, scores, own in zip(files, found["scores"], exact, strict=True)
    ]  # fmt: skip
    return {
        "llama_cpp_python": found["version"],
        "model": args.name or args.model.name,
        "n_tokens": windows.shape[0] * (windows.shape[1] - 1),
        "n_exact_tokens": len(spread) * (windows.shape[1] - 1),
        "importance_tokens": importance_tokens,
        "files": rows,
    }


def by_tensor(model: Path, importance: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """``importance`` by the names of GGUF's tensors."""
    spec = read_spec(model)
    return {
        part.name: importance[entry.canonical].numpy()
        for entry in tensors(spec, family_row(spec).weights)
        for part in entry.parts
        if entry.canonical in importance
    }


@torch.no_grad()
def exact_scores(files: list[Path], windows: np.ndarray) -> list[dict[str, list[float]]]:
    """Nats a token and KL(first ‖ file) of each window with the very numbers that a file's codes stand for, in fp32."""
    models = []
    for file in files:
        source = read_gguf(file, "fp32")
        models.append(filled(Decoder(source.spec, torch.float32, device="meta"), "cpu", source.state.items()))
    found: list[dict[str, list[float]]] = [{"nats": [], "kl": []} for _ in files]
    for row in windows:
        ids = torch.from_numpy(row)
        exact: torch.Tensor | None = None
        for decoder, scores in zip(models, found, strict=True):
            own = torch.log_softmax(decoder(ids[None])[0, :-1].double(), dim=-1)
            exact = own if exact is None else exact
            scores["nats"].append(-float(own.gather(1, ids[1:, None]).mean()))
            scores["kl"].append(float((exact.exp() * (exact - own)).sum(dim=1).mean()))
    return found


def ratio(row: dict[str, Any], other: dict[str, Any], where: str) -> tuple[float, float, float]:
    """Of perplexities, with its 95% interval over windows, each compared with itself."""
    differences = np.subtract(row[where]["nats"], other[where]["nats"])
    mean, error = float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return math.exp(mean), math.exp(mean - 1.96 * error), math.exp(mean + 1.96 * error)


def table(document: dict[str, Any]) -> str:
    plain, *rows = document["files"]
    perplexity = math.exp(float(np.mean(plain["in_llama_cpp"]["nats"])))
    lines = [
        f"# GGUF files by Twostroke and by llama.cpp: {document['model']}, *measured*",
        "",
        f"{document['n_tokens']} held-out tokens, perplexity {perplexity:.4f} in F32; {document['machine']}, "
        f"llama-cpp-python {document['llama_cpp_python']}. Ratios of perplexities; KL(F32 ‖ file) in 1e-3 nats a token. *In "
        f"fp32*: with the numbers that the codes stand for, {document['n_exact_tokens']} tokens. Importance: mean squares over "
        f"{document['importance_tokens']} tokens of training text, the same for both.",
        "",
        "| precision | importance | quantised by | MB | to F32 | KL | KL in fp32 | ours to theirs (95%) | in fp32 | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        other = next(r for r in rows if r != row and all(r[key] == row[key] for key in ("precision", "importance")))
        cells = [row["precision"], "yes" if row["importance"] else "no", row["quantised_by"], f"{row['bytes'] / 1e6:.3f}"]
        cells.append(f"{ratio(row, plain, 'in_llama_cpp')[0]:.5f}")
        cells += [f"{1e3 * float(np.mean(row[where]['kl'])):.3f}" for where in ("in_llama_cpp", "in_fp32")]
        if row["quantised_by"] == "Twostroke":
            mean, low, high = ratio(row, other, "in_llama_cpp")
            cells += [f"{mean:.5f} ({low:.5f} to {high:.5f})", f"{ratio(row, other, 'in_fp32')[0]:.5f}"]
            cells.append("passes" if mean <= LIMIT and row["bytes"] <= other["bytes"] * 1.001 else "fails")
        else:
            cells += ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
