"""Run by llama.cpp's own interpreter: quantises a GGUF file with llama.cpp's quantiser, and scores files on windows of tokens.

Takes a JSON request and answers with a line of JSON. ``quantise``: [{"to": file, "type": number of the mix, "importance":
.npz of mean squares by tensor, or null}] of the file ``source``. ``files``: what to score on ``windows``, a .npy (windows,
tokens), against the first one: for each the nats a token and KL(first ‖ file) of every window.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp as lc
import numpy as np


@lc.llama_log_callback
def quiet(level: int, text: bytes, data: Any) -> None:
    if level >= 4:
        sys.stderr.write(text.decode("utf-8", "replace"))


def quantise(source: str, to: str, number: int, importance: str | None) -> None:
    options = lc.llama_model_quantize_default_params()
    options.nthread, options.ftype = 2, number
    if importance is not None:
        means = {name: np.ascontiguousarray(row, dtype=np.float32) for name, row in np.load(importance).items()}
        table = (lc.llama_model_imatrix_data * (len(means) + 1))()  # one without a name ends it
        for entry, (name, row) in zip(table, means.items(), strict=False):
            entry.name, entry.size = name.encode(), row.size
            entry.data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        options.imatrix = table
    if lc.llama_model_quantize(source.encode(), to.encode(), ctypes.byref(options)) != 0:
        raise SystemExit(f"llama.cpp did not quantise {to}")


def opened(file: str, length: int) -> lc.Llama:
    """With keys and values in fp32 and without repacked weights: what differs between files is their numbers."""
    return lc.Llama(
        file, n_ctx=length, n_batch=length, n_ubatch=length, n_threads=2, n_threads_batch=2, logits_all=True, flash_attn=False,
        type_k=0, type_v=0, verbose=False,
    )  # fmt: skip


def logprobs(model: lc.Llama, ids: list[int]) -> np.ndarray:
    """(T − 1, V) log-probabilities of the tokens after each of ``ids`` but the last."""
    model.reset()
    model.eval(ids)
    logits = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def score(files: list[str], windows: np.ndarray) -> list[dict[str, list[float]]]:
    models = [opened(file, windows.shape[1]) for file in files]
    found: list[dict[str, list[float]]] = [{"nats": [], "kl": []} for _ in files]
    for ids in windows.tolist():
        exact: np.ndarray | None = None
        for model, scores in zip(models, found, strict=True):
            own = logprobs(model, ids)
            exact = own if exact is None else exact
            scores["nats"].append(-float(np.take_along_axis(own, np.asarray(ids[1:])[:, None], axis=1).mean()))
            scores["kl"].append(float((np.exp(exact) * (exact - own)).sum(axis=1).mean()))
    return found


def main() -> None:
    lc.llama_log_set(quiet, ctypes.c_void_p(0))
    lc.llama_backend_init()
    asked = json.loads(sys.argv[1])
    for wanted in asked["quantise"]:
        quantise(asked["source"], wanted["to"], wanted["type"], wanted["importance"])
    print(json.dumps({"version": lc.__version__, "scores": score(asked["files"], np.load(asked["windows"]))}))


if __name__ == "__main__":
    main()
