"""Typed access to a GGUF file's metadata: each value that is missing or impossible is a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np

from twostroke.core.errors import CorruptFileError
from twostroke.interop.gguf import GgufFile

NO_TOKEN = 2**32 - 1  # an absent token id in some files


class Metadata:
    """The metadata of ``file``. A missing or wrong value raises CorruptFileError, as do texts and numbers of another count."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def _get(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self.file.metadata.get(key)
        if value is None:
            if default is None:
                raise CorruptFileError(f"{self.file.path} has no metadata {key!r}.")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise CorruptFileError(f"{self.file.path}: metadata {key}={value!r:.60} must be {what}.")
        return value

    def __contains__(self, key: str) -> bool:
        return key in self.file.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, (int,), "a whole number", default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal number that the file's fp32 stands for: 1e-5 is stored as 0.0000099999997."""
        value = float(self._get(key, (int, float), "a number", default))
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else value

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._get(key, (str,), "text", default)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._get(key, (bool,), "true or false", default)
        return value

    def texts(self, key: str) -> list[str]:
        value: list[str] = self._get(key, (list,), "a list of texts", None)
        return value

    def numbers(self, key: str, n: int, what: str, default: np.ndarray | None = None) -> list[Any]:
        """``n`` finite numbers, one for each ``what``."""
        value: np.ndarray = self._get(key, (np.ndarray,), "a list of numbers", default)
        if len(value) != n or not np.isfinite(value).all():
            raise CorruptFileError(f"{self.file.path}: metadata {key} must hold {n} finite numbers, one for each {what}.")
        return list(value.tolist())

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self.file.metadata.get(key)
        if value is None or value == NO_TOKEN:
            return None
        if self.integer(key) not in range(vocab_size):
            raise CorruptFileError(
                f"{self.file.path}: metadata {key}={value} is outside the vocabulary of {vocab_size} tokens."
            )
        return self.integer(key)
