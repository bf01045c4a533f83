"""``twostroke quantize MODEL --survey`` as a run that can be committed. See README.md."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", nargs="*", default=[], help="text to fit to and to judge by; default: the run's own")
    parser.add_argument("--name", help="of the model, in the record; default: its folder's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    name = args.name or args.model.name
    text = [word for file in args.calibration for word in ("--calibration", file)]
    command = [sys.executable, "-m", "twostroke", "quantize", str(args.model), "--survey", *text, "--json"]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False)
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    typed = " ".join(["twostroke quantize", name, "--survey", *(Path(word).name for word in text)])
    document = {"command": typed, "commit": git.stdout.strip(), "machine": processor(), **found, "model": name}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "raw.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (args.out / "summary.md").write_text(table(document), encoding="utf-8")
    print(table(document))


def processor() -> str:
    """As Linux names it, with its family and model, which virtual machines leave as they are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    known = {key.strip(): value.strip() for key, value in found.items()}
    return f"{known.get('model name')} (family {known.get('cpu family')}, model {known.get('model')})"


def table(document: dict[str, Any]) -> str:
    lines = [
        f"# Every scheme of {document['model']}",
        "",
        f"KL and perplexity *measured* on {document['judged_tokens']} tokens that nothing was fitted to, with activations in "
        "8 bits as the engine has them; tokens/s *predicted* for one request on "
        f"{document['hardware']}; {document['machine']}.",
        "",
        "| scheme | MiB | bits a weight | KL, nats a token | perplexity ratio | decode | prefill | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        mixed = f" + {row['n_int8_matrices']} in int8" if row["n_int8_matrices"] else ""
        quality = ("", "") if row["kl_nats"] is None else (f"{row['kl_nats']:.5f}", f"{row['perplexity_ratio']:.4f}")
        rates = (f"{row[key]:,.0f}" if row[key] else "" for key in ("decode_tok_per_s", "prefill_tok_per_s"))
        size = (f"{row['bytes'] / 2**20:.2f}", f"{row['bits_per_weight']:.2f}")
        cells = (f"{row['scheme']}{mixed} {row['rounding']}".strip(), *size, *quality, *rates)
        cells = (*cells, f"beaten by {row['beaten_by']}" if row["beaten_by"] else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
