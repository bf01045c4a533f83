"""From a GGUF file to a ready engine, beside reading the file's bytes and packing its numbers. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded

from twostroke.core.families.weights import tensors
from twostroke.core.spec import ModelSpec
from twostroke.engine.core import EngineCore
from twostroke.interop.gguf_encode import encode
from twostroke.interop.gguf_families import family_row
from twostroke.interop.gguf_fields import metadata_of
from twostroke.interop.gguf_mixes import PRECISIONS, Place
from twostroke.interop.gguf_model import read_gguf
from twostroke.interop.gguf_write import Stored, write_header, write_tensor
from twostroke.interop.import_model import import_model
from twostroke.model.published.gguf_types import TYPES

WIDTH, MLP, HEADS, KEY_HEADS, VOCABULARY = 2048, 5632, 32, 4, 32_000
"""TinyLlama's."""


def write_file(file: Path, precision: str, n_bytes: int) -> ModelSpec:
    """A Llama of TinyLlama's widths and as many layers as ``n_bytes`` hold, in random numbers, which repeat: nothing that is
    timed looks at them."""

    def rows_of(n_layers: int) -> tuple[ModelSpec, list[Stored]]:
        spec = ModelSpec(
            "llama",
            VOCABULARY,
            n_layers,
            WIDTH,
            HEADS,
            KEY_HEADS,
            WIDTH // HEADS,
            MLP,
            2048,
            eos_token_ids=(2,),
            bos_token_id=1,
        )
        rows = []
        for entry in tensors(spec, family_row(spec).weights):
            for part in entry.parts:
                *above, stem, _ = part.name.split(".")
                layer = int(above[1]) if above else None
                place = Place(stem, layer, n_layers, stem == "output", "llama", 0)
                shape = entry.stored_shape(part)
                rows.append(Stored(part.name, TYPES["F32" if len(shape) == 1 else PRECISIONS[precision].choose(place)], shape))
        return spec, rows

    n_layers = next(n for n in range(1, 100) if sum(row.n_bytes for row in rows_of(n)[1]) >= n_bytes)
    spec, rows = rows_of(n_layers)
    row, chosen = family_row(spec), PRECISIONS[precision]
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(512, WIDTH, generator=generator) * 0.02
    encoded = {row.kind.name: encode(row.kind, sample) for row in rows}
    with file.open("wb") as stream:
        write_header(stream, {**metadata_of(row, spec), "general.file_type": chosen.number}, rows)
        for stored in rows:
            write_tensor(stream, stored, np.resize(encoded[stored.kind.name], stored.n_bytes))
        stream.flush()
        os.fsync(stream.fileno())
    return spec


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the clock, and of processors."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def read_bytes(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(2**22):
            pass


def forget(file: Path) -> None:
    """Out of the page cache, so that the next read comes from the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure(precision: str, n_bytes: int, folder: Path) -> dict[str, Any]:
    """One file, in a process of its own, with an empty cache of packed weights."""
    file, directory = folder / "model.gguf", folder / "model"
    spec = write_file(file, precision, n_bytes)
    os.sync()
    forget(file)
    cold = timed(lambda: read_bytes(file))
    forget(file)
    imported = timed(lambda: import_model(file, directory))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    engine = timed(lambda: EngineCore(directory))
    source = read_gguf(file)
    decode = timed(lambda: deque((source.state[name] for name in source.state), maxlen=0))
    return {
        "precision": precision, "n_layers": spec.n_layers, "file_bytes": file.stat().st_size,
        "written_bytes": sum(path.stat().st_size for path in directory.iterdir()), "import_peak_bytes": peak,
        "read": cold, "decode": decode, "import": imported, "engine": engine,
        "times_engine": (imported[0] + engine[0]) / (cold[0] + engine[0]),
        "times_decode_and_engine": (imported[0] + engine[0]) / (cold[0] + decode[0] + engine[0]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", nargs="*", default=["Q4_K_M", "Q8_0"], choices=tuple(PRECISIONS))
    parser.add_argument("--bytes", type=float, default=1e9, help="of each file")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: that of temporary files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, int(args.bytes), args.folder)))
        return
    conditions, rows = recorded.conditions(), []
    for precision in args.precisions:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            command = [sys.executable, __file__, "--one", precision, "--bytes", str(args.bytes), "--folder", folder]
            environment = os.environ | {"TWOSTROKE_HOME": str(Path(folder) / "home")}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    document = conditions | {"threads": torch.get_num_threads(), "files": rows}
    print(table(document))
    if args.out:
        recorded.write(args.out, {"raw.json": document, "summary.md": table(document)})


def table(document: dict[str, Any]) -> str:
    lines = [
        "# From a GGUF file to a ready engine, *measured*",
        "",
        f"{document['machine']}, {document['threads']} threads beside {document['load_average_at_start']:.0f} of other "
        "programs. Seconds of the clock (of processors); the file is read from the disk, its model directory from memory. A: "
        "import and engine in times reading and engine; B: in times reading, decoding and engine.",
        "",
        "| file | GB | GB written | read | decode alone | import | its memory, GB | engine | A | B |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["files"]:
        read, decode, imported, engine = (
            f"{row[key][0]:.2f} ({row[key][1]:.2f})" for key in ("read", "decode", "import", "engine")
        )
        cells = [row["precision"], *(f"{row[key] / 1e9:.2f}" for key in ("file_bytes", "written_bytes"))]
        cells += [read, decode, imported, f"{row['import_peak_bytes'] / 1e9:.2f}", engine]
        cells += [f"{row[key]:.2f}" for key in ("times_engine", "times_decode_and_engine")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
