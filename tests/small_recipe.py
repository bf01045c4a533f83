"""A recipe that trains in seconds, as a file."""

from __future__ import annotations

import random
from pathlib import Path

RECIPE = """
output = "{output}"
[model]
n_layers = 2
d_model = 32
n_heads = 2
d_ff = 48
[data]
sources = ["{corpus}"]
vocab_size = 300
[train]
steps = {steps}
batch_size = 2
sequence_length = 32
dtype = "bf16"
optimizer = "muon"
compile = false
"""


def write_recipe(folder: Path, name: str, steps: int) -> Path:
    """``name``.toml in ``folder``, which trains on texts that lie there into the directory ``name``."""
    corpus = folder / "corpus"
    if not corpus.is_dir():
        corpus.mkdir()
        draw = random.Random(1)
        for number in range(12):
            words = (draw.choice(("alpha", "beta", "gamma = delta\n", "(", ")")) for _ in range(150))
            (corpus / f"{number}.txt").write_text(" ".join(words))
    file = folder / f"{name}.toml"
    file.write_text(RECIPE.format(output=folder / name, corpus=corpus, steps=steps))
    return file
