"""Tokens that rounding is fitted to: of the files that are named, or of the text that the model itself was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twostroke.core.documents import read_object
from twostroke.core.errors import CorruptFileError, DataError
from twostroke.core.spec import ModelSpec
from twostroke.data.shards import TokenStream, open_prepared
from twostroke.data.sources import find_documents
from twostroke.data.tokenizer import eos_id_of, load_tokenizer
from twostroke.planner.work.params import count_parameters

N_TOKENS = 32 * 1024
"""More changes little: 16 rows of inputs for each column of the widest matrix of a small model."""

LEAST_TOKENS = 8 * 1024
"""However large the model."""

PARAMETERS_BY_TOKENS = 8e12
"""Fewer tokens for larger models, so that fitting stays a matter of minutes: half as many at 490M, the least at 1B."""

ROW_TOKENS = 512
_BATCH_ROWS = 8


def text_size(spec: ModelSpec) -> tuple[int, int]:
    """(tokens to fit to, tokens of a row)."""
    wanted = min(N_TOKENS, max(LEAST_TOKENS, int(PARAMETERS_BY_TOKENS / count_parameters(spec).total)))
    return wanted, min(ROW_TOKENS, spec.max_positions)


def calibration_batches(directory: Path, spec: ModelSpec, sources: Sequence[str] = ()) -> list[Tensor]:
    """(B, T) batches of up to ``N_TOKENS`` tokens, fewer for large models; empty where no ``sources`` are named and the model
    belongs to no run here.

    A run's held-out text is never among them. Raises DataError where the sources hold too little text for one row.
    """
    wanted, length = text_size(spec)
    ids = _of_sources(directory, sources, wanted) if sources else _of_the_run(directory, length, wanted)
    if ids is None:
        return []
    rows = ids[: len(ids) // length * length].reshape(-1, length)
    if not len(rows):
        raise DataError(f"{', '.join(sources) or directory} holds {len(ids)} tokens; calibration needs {length} at least.")
    tokens = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
    if int(tokens.max()) >= spec.vocab_size:
        raise DataError(f"the text has token {int(tokens.max())} and the model a vocabulary of {spec.vocab_size}.")
    return list(tokens.split(_BATCH_ROWS))


def has_run(directory: Path) -> bool:
    """Whether the model in ``directory`` belongs to a run here, whose text is there unless it was removed."""
    return _record(directory).is_file()


def _record(directory: Path) -> Path:
    return directory.parent / "recipe.json"


def _of_sources(directory: Path, sources: Sequence[str], n_tokens: int) -> np.ndarray:
    tokenizer = load_tokenizer(directory)
    eos_id = eos_id_of(tokenizer, directory)
    tokenizer.encode_special_tokens = True
    ids: list[int] = []
    for document in find_documents(tuple(sources), "text"):
        ids += [*tokenizer.encode(document.text, add_special_tokens=False).ids, eos_id]
        if len(ids) >= n_tokens:
            break
    return np.asarray(ids[:n_tokens])


def _of_the_run(directory: Path, length: int, n_tokens: int) -> np.ndarray | None:
    """Rows spread evenly over the training part of the run that the model lies in."""
    record = _record(directory)
    if not record.is_file():
        return None
    try:
        prepared = open_prepared(Path(read_object(record)["resolved"]["data_directory"]))
    except (DataError, CorruptFileError, ValueError, KeyError, TypeError):
        return None
    if prepared.n_train_tokens < length:
        return None
    return np.concatenate(list(_spread(prepared.train_tokens(), length, n_tokens)))


def _spread(tokens: TokenStream, length: int, n_tokens: int) -> Iterator[np.ndarray]:
    n_rows = min(n_tokens // length, len(tokens) // length)
    for i in range(n_rows):
        start = i * (len(tokens) - length) // max(1, n_rows - 1)
        yield np.asarray(tokens[start : start + length])
