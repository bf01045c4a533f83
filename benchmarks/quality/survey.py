"""``twostroke quantize MODEL --survey`` as a run that can be committed. See README.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", nargs="*", default=[], help="text to fit to and to judge by; default: the run's own")
    parser.add_argument("--name", help="of the model, in the record; default: its folder's")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    text = [word for file in args.calibration for word in ("--calibration", file)]
    command = [sys.executable, "-m", "twostroke", "quantize", str(args.model), "--survey", *text, "--json"]
    conditions = recorded.conditions()
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    document = conditions | found | {"model": args.name or args.model.name}
    recorded.write(args.out, {"raw.json": document, "summary.md": table(document)})
    print(table(document))


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
