"""Measures preparing text on the standard library's own source: reading, training a tokenizer, tokenising."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.core.data_recipe import DataRecipe
from twostroke.core.rates import TextRates
from twostroke.data.selection import select
from twostroke.data.sources import find_documents
from twostroke.data.tokenizer import train_tokenizer

SAMPLE_BYTES = 1_500_000
"""Text of the sample: a second's work."""

FEW_ENTRIES, MANY_ENTRIES = 512, 8192
BATCH_DOCUMENTS = 50


def measure_text(sample_bytes: int = SAMPLE_BYTES) -> TextRates:
    """Seconds a byte of each stage of ``data.prepare``, each run once: a stage is many calls, whose mean is steady."""
    source = find_documents(("stdlib",), "text")
    with tempfile.TemporaryDirectory(prefix="twostroke-text-") as folder:
        place = Path(folder)
        read_s, (selection, _) = _timed(lambda: select(DataRecipe(), source, None, place, lambda done, note: None))
        texts = _sample([document.text for document, held, _ in selection.parts(source) if not held], sample_bytes)
        n_bytes = sum(len(text.encode()) for text in texts)
        few_s, _ = _timed(lambda: train_tokenizer(iter(texts), FEW_ENTRIES, place / "few.json"))
        many_s, tokenizer = _timed(lambda: train_tokenizer(iter(texts), MANY_ENTRIES, place / "many.json"))
        batches = [texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(texts), BATCH_DOCUMENTS)]
        encode_s, _ = _timed(lambda: [tokenizer.encode_batch_fast(b, add_special_tokens=False) for b in batches])
    merge_byte_s = max(0.0, many_s - few_s) / (MANY_ENTRIES - FEW_ENTRIES) / n_bytes
    train_byte_s = max(few_s / n_bytes - FEW_ENTRIES * merge_byte_s, 0.0)
    return TextRates(read_s / max(1, source.n_file_bytes), train_byte_s, merge_byte_s, encode_s / n_bytes)


def _sample(texts: list[str], n_bytes: int) -> list[str]:
    """Every n-th document, so many that they hold about ``n_bytes``."""
    return texts[:: max(1, round(sum(map(len, texts)) / n_bytes))]


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result
