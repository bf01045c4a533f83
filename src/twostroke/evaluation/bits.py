"""Bits per byte: the length of held-out text when a model encodes it, beside its length under xz."""

from __future__ import annotations

import contextlib
import json
import lzma
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from twostroke.core.aside import write_text
from twostroke.core.errors import DataError, InputError, TwostrokeError
from twostroke.core.policy import SCORED_TOKENS_PER_PASS
from twostroke.core.spec import ModelSpec
from twostroke.data.shards import PreparedData
from twostroke.data.tokenizer import eos_id_of, load_tokenizer
from twostroke.evaluation.decoder_pass import Pass, score_passes
from twostroke.evaluation.held_out import HeldOutText, Tokens, held_out_at, held_out_of, tokenize
from twostroke.evaluation.stream import stream_nats

if TYPE_CHECKING:
    from twostroke.engine.scoring import TokenScores

DEFAULT_CONTEXT = 2048
"""Longest context for scoring by default. A longer one costs more attention and gains little."""

_XZ_CACHE = "xz.json"

Progress = Callable[[float, str], None]


class Scorable(Protocol):
    """The part of ``twostroke.model.decoder.Decoder`` that scoring uses."""

    def hidden(self, tokens: torch.Tensor, positions: Any, documents: Any) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def head_weight(self) -> torch.Tensor: ...
    @property
    def training(self) -> bool: ...
    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class BitsPerByte:
    """bits_per_byte = Σ nats / (ln 2 · bytes); nats_per_token = Σ nats / tokens; perplexity = exp(nats_per_token).

    Σ runs over all tokens, including end-of-texts. The bytes are those of the joined text, in which an end-of-text has none.
    ``xz_bits_per_byte`` = 8 · bytes of ``xz -9`` / bytes of the same joined text.
    """

    bits_per_byte: float
    nats_per_token: float
    perplexity: float
    n_tokens: int
    n_bytes: int
    xz_bits_per_byte: float | None
    context: int
    stride: int


def token_nats(
    model: Scorable,
    ids: npt.NDArray[np.integer],
    eos_id: int,
    context: int,
    stride: int,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> npt.NDArray[np.float32]:
    """−ln p of each token of a stream of documents, given the tokens before it in its document.

    Windows of ``context`` tokens start every ``stride`` tokens. Each token is scored once, in the first window that reaches it,
    so it sees at least ``context − stride`` tokens if its document has them. Positions restart and attention ends at document
    boundaries, as in training. Nothing predicts a document's first token, so it costs ln V, as if all tokens were equally
    probable. The model's mode (train or eval) is restored. tests/evaluation/test_bits.py compares it with scoring one token at
    a time.
    """
    score = partial(score_passes, model, device=device)
    return _window_nats(score, model.spec.vocab_size, ids, eos_id, context, stride, progress)


def _window_nats(
    score: Callable[[Iterable[Pass]], Iterable[TokenScores]],
    n_vocabulary: int,
    ids: npt.NDArray[np.integer],
    eos_id: int,
    context: int,
    stride: int,
    progress: Progress | None,
) -> npt.NDArray[np.float32]:
    """``token_nats`` by ``score``, which gives the scores of passes in their order."""
    if not 1 <= stride <= context:
        raise InputError(f"stride={stride} must be between 1 and context={context}.")
    if len(ids) and int(ids.max()) >= n_vocabulary:
        raise InputError(
            f"the text has token id {int(ids.max())}, beyond the model's vocabulary of {n_vocabulary}. Use the model's "
            "tokenizer."
        )
    nats = np.full(len(ids), math.log(n_vocabulary), dtype=np.float32)
    n_targets = len(ids) - 1
    if n_targets < 1:
        return nats
    length = min(context, n_targets)
    starts = [*range(0, n_targets - length, stride), n_targets - length]
    rows_per_pass = max(1, SCORED_TOKENS_PER_PASS // length)
    batches = [starts[i : i + rows_per_pass] for i in range(0, len(starts), rows_per_pass)]
    places: deque[npt.NDArray[np.int64]] = deque()  # where in ``ids`` the targets of passes are whose scores have not come yet
    for n_done, (scored, _) in enumerate(score(_passes(ids, eos_id, length, batches, places)), 1):
        nats[places.popleft()] = scored
        if progress is not None:
            progress(n_done / len(batches), "scoring")
    return nats


def _passes(
    ids: npt.NDArray[np.integer],
    eos_id: int,
    length: int,
    batches: Sequence[Sequence[int]],
    places: deque[npt.NDArray[np.int64]],
) -> Iterator[Pass]:
    """A pass for each of ``batches``, the starts of windows of ``length`` tokens. Where its targets are is added to
    ``places``."""
    after_end = np.concatenate(([True], ids[:-1] == eos_id))  # tokens that begin a document
    scored_to = 1  # tokens before this index have their score
    for batch in batches:
        tokens = np.stack([ids[s : s + length] for s in batch]).astype(np.int64)
        wanted = []  # indices, in the stream, of the tokens that each row scores
        for s in batch:
            reach = np.arange(max(scored_to, s + 1), s + length + 1)
            wanted.append(reach[~after_end[reach]])
            scored_to = max(scored_to, s + length + 1)
        rows = np.repeat(np.arange(len(batch)), [len(w) for w in wanted])
        targets = np.concatenate(wanted)
        places.append(targets)
        yield Pass(tokens, rows, targets - 1 - np.asarray(batch)[rows], ids[targets].astype(np.int64), eos_id)


def default_context(model: Any) -> int:
    """The model's longest sequence, but at most ``DEFAULT_CONTEXT``."""
    return min(DEFAULT_CONTEXT, _longest(model))


def _longest(model: Any) -> int:
    """The longest sequence: a ``Scorer``'s, which its memory may limit, or the positions of a ``Decoder``."""
    return int(getattr(model, "longest", model.spec.max_positions))


def default_stride(context: int) -> int:
    """Three quarters of the context, so that every token inside a document sees at least a quarter of it."""
    return max(1, context - context // 4)


def check_context(model: Any, context: int) -> None:
    longest = _longest(model)
    if not 1 <= context <= longest:
        limit = "max_positions" if longest == model.spec.max_positions else "longest sequence in this memory,"
        raise InputError(f"context={context} must be between 1 and the model's {limit}={longest}.")


def nats_of(
    model: Any,
    ids: npt.NDArray[np.integer],
    eos_id: int,
    context: int,
    stride: int,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> npt.NDArray[np.float32]:
    """−ln p of each token as in ``token_nats``, for a ``Decoder`` or any ``Scorer``."""
    if not hasattr(model, "token_scores"):
        return token_nats(model, ids, eos_id, context, stride, device, progress)
    if model.engine == "decoder":  # it packs documents into its windows, which costs less than scoring them one by one
        return _window_nats(model.score_passes, model.spec.vocab_size, ids, eos_id, context, stride, progress)
    return stream_nats(model, ids, eos_id, context, stride, progress)


def bits_per_byte(
    model: Any,
    source: PreparedData | HeldOutText | Path | str,
    heldout_path: Path | str | None = None,
    ctx: int | None = None,
    stride: int | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    tokenizer_path: Path | str | None = None,
    with_xz: bool = True,
) -> BitsPerByte:
    """Score ``model``, a ``Decoder`` or a ``Scorer``, on held-out text in its own dtype (``BitsPerByte`` says how).

    ``source`` is prepared data, a ``HeldOutText`` with the model's ``tokenizer_path``, or that tokenizer's path with the text
    at ``heldout_path`` (one file, or a prepared directory). ``ctx`` defaults to the model's longest sequence, at most 2048.
    Windows move by ``stride``, by default three quarters of ``ctx``. Each pass computes ``ctx`` tokens to score ``stride``, so
    half of ``ctx`` would cost half as much again.
    """
    if isinstance(source, PreparedData):
        text = held_out_of(source)
        tokenizer_path = tokenizer_path or source.tokenizer_path
    elif isinstance(source, HeldOutText):
        text = source
    else:
        tokenizer_path = source
        if heldout_path is None:
            raise InputError("the source is a tokenizer, which holds no text to score: give heldout_path as well.")
        text = held_out_at(heldout_path)
    if tokenizer_path is None:
        raise InputError("scoring needs the model's tokenizer, so give tokenizer_path.")
    tokens = tokens_for(text, tokenizer_path)
    context = default_context(model) if ctx is None else ctx
    check_context(model, context)
    stride = default_stride(context) if stride is None else stride
    nats = nats_of(model, tokens.ids, tokens.eos_id, context, stride, device, progress)
    total = float(nats.sum(dtype=np.float64))
    if not math.isfinite(total):
        raise TwostrokeError("the model's output was not finite. The weights may be damaged.")
    per_token = total / len(nats)
    return BitsPerByte(
        bits_per_byte=total / (math.log(2) * tokens.n_bytes),
        nats_per_token=per_token,
        perplexity=math.exp(per_token) if per_token < 700 else math.inf,
        n_tokens=len(nats),
        n_bytes=tokens.n_bytes,
        xz_bits_per_byte=xz_of(text) if with_xz else None,
        context=context,
        stride=stride,
    )


def tokens_for(text: HeldOutText, tokenizer_path: Path | str) -> Tokens:
    """``text`` as ids of that tokenizer. If prepared data was made with the same tokenizer, its ids are taken."""
    tokenizer = load_tokenizer(tokenizer_path)
    prepared = text.prepared
    if prepared is not None and tokenizer.to_str() == load_tokenizer(prepared.tokenizer_path).to_str():
        stream = prepared.heldout_tokens()
        return Tokens(stream[: len(stream)].astype(np.int64), prepared.eos_id, prepared.n_heldout_bytes)
    return tokenize(text, tokenizer, eos_id_of(tokenizer, tokenizer_path))


def xz_bits_per_byte(path: Path | str) -> float:
    """8 · bytes of ``xz -9`` (LZMA2 preset 9 in an .xz container) / bytes of the file at ``path``, read in pieces."""

    def blocks() -> Iterator[bytes]:
        with open(path, "rb") as stream:
            while block := stream.read(2**20):
                yield block

    return _xz_ratio(blocks(), str(path))


def _xz_ratio(blocks: Iterable[bytes], name: str) -> float:
    compressor = lzma.LZMACompressor(format=lzma.FORMAT_XZ, preset=9)
    n_in = n_out = 0
    for block in blocks:
        n_in += len(block)
        n_out += len(compressor.compress(block))
    n_out += len(compressor.flush())
    if n_in == 0:
        raise DataError(f"{name} holds no text to compress. Name another file.")
    return 8 * n_out / n_in


def xz_of(text: HeldOutText) -> float:
    """``xz_bits_per_byte`` of the joined text. Beside prepared data the result is cached under the text's sha256."""
    prepared = text.prepared
    if prepared is None:
        return _xz_ratio(text.joined(), text.name)
    digest = prepared.files[prepared.heldout_path.name]["sha256"]
    cache = prepared.directory / _XZ_CACHE
    try:
        remembered = json.loads(cache.read_text(encoding="utf-8"))
        if remembered["sha256"] == digest and remembered["xz_bits_per_byte"] > 0:
            return float(remembered["xz_bits_per_byte"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the cache is missing or damaged
    value = xz_bits_per_byte(prepared.heldout_path)
    with contextlib.suppress(OSError):  # in a read-only folder the next call compresses again, a second for each megabyte
        write_text(cache, json.dumps({"sha256": digest, "xz_bits_per_byte": value}))
    return value
