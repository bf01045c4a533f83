"""Which tokens may follow in answers that must have a given form. Imports no torch."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import DataError, InputError
from twostroke.core.spec import ModelSpec
from twostroke.data import grammars
from twostroke.data.tokenizer import library_error, load_tokenizer
from twostroke.scheduling.constraint import Constraint
from twostroke.scheduling.request import Request

MOST_KEPT = 64
"""Compiled constraints that are kept for later requests."""


class Matcher:
    """How far one answer has come in its form. ``words`` has a bit for each token, from the lowest on: those that may come
    next."""

    def __init__(self, form: Any, n_prompt: int, n_vocab: int, ends: frozenset[int], vocabulary: Any = None) -> None:
        self.words: npt.NDArray[np.uint32] = np.zeros(-(-n_vocab // 32), np.uint32)
        self._form = form
        self._n_prompt = n_prompt
        self._ends = ends
        self._vocabulary = vocabulary
        self.expected: list[int] = []
        """Tokens of the one text that may follow, as the tokenizer cuts it; empty if several may, or if nobody has asked."""
        self._expected_at = 0  # tokens there were before them
        self._n_right = 0  # of the same text those that came before ``expected``
        self._seen: list[int] = []
        self._known = False  # whether ``words`` are those behind ``_seen``
        self.ahead: Future[None] | None = None
        """What a thread finds at present. Every method waits for it."""

    def look(self, tokens: Sequence[int]) -> None:
        """Find what may follow ``tokens``, a prompt and what was answered: nothing, if llguidance's limits are reached."""
        self._wait()
        self.look_in_thread(tokens)

    def look_in_thread(self, tokens: Sequence[int]) -> None:
        """``look``, by the thread that ``ahead`` is of."""
        self._follow(tokens)
        if not self._known:
            self._form.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
            if self._form.is_error():
                self.words[:] = 0  # llguidance would end the answer here, as if it were complete
            self._known = True

    def allowed(self, n_vocab: int) -> npt.NDArray[np.bool_]:
        """Of the first ``n_vocab`` tokens, whether each may come next, by the last ``look``."""
        return np.unpackbits(self.words.view(np.uint8), bitorder="little")[:n_vocab].astype(bool)

    def accepted(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """Of ``draft`` behind ``tokens``, the number of tokens before the first that does not continue the form."""
        self._wait()
        self._follow(tokens)
        return 0 if self._form.is_error() else int(self._form.validate_tokens(list(draft)))

    def compared(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Of the tokens that have come since ``expected`` was found: its place in its text, and whether it was expected, up to
        the first that was not. What is left of ``expected`` stays."""
        found: list[tuple[int, bool]] = []
        if len(tokens) < self._expected_at:  # a step was interrupted
            self.expected = []
        for token in tokens[self._expected_at :]:
            if not self.expected:
                break
            right = token == self.expected.pop(0)
            found.append((self._n_right, right))
            self._n_right += 1
            if not right:
                self.expected = []
        self._expected_at = len(tokens)
        return found

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """``expected`` behind ``tokens``, which were ``compared``."""
        if not self.expected:
            self._wait()
            self._follow(tokens)
            text = b"" if self._form.is_error() else bytes(self._form.compute_ff_bytes())
            self.expected = list(self._vocabulary.tokenize_partial(text)[0]) if text else []
            self._n_right = 0
        return self.expected

    def _wait(self) -> None:
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.result()

    def _follow(self, tokens: Sequence[int]) -> None:
        """Come to the end of ``tokens``. Those that were seen and are not among them any more, after an interrupted step, are
        taken back. An end is not the form's, and what stands behind it is not taken."""
        given, seen = list(tokens[self._n_prompt :]), self._seen
        for i in range(len(seen), len(given)):
            if given[i] in self._ends:
                del given[i:]
                break
        if given[: len(seen)] != seen:
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(given, seen, strict=False))
            n = sum(1 for _ in equal)
            self._form.rollback(len(seen) - n)
            del seen[n:]
            self._known = False
        if len(given) > len(seen):
            self._form.consume_tokens(given[len(seen) :])
            seen += given[len(seen) :]
            self._known = False


class Grammars:
    """Of the model in ``directory``. Its tokenizer is read when a form is first asked for."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self.used = False
        self._directory = directory
        self._spec = spec
        self._vocabulary: Any = None
        self._kept: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = Lock()
        self._executor: ThreadPoolExecutor | None = None

    def compile(self, constraint: Constraint) -> Any:
        """Compile ``constraint`` and keep it. Any thread may. Raises what ``data.grammars.compiled`` raises, InputError if the
        model has no end token, and DataError if its tokenizer cannot be used."""
        with self._lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
                return found
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        found = grammars.compiled(constraint, self._vocabulary)
        with self._lock:
            self._kept[constraint] = found
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return found

    def begin(self, request: Request, constraint: Constraint) -> None:
        """Let ``request`` follow ``constraint``. Raises what ``compile`` raises."""
        form = self.compile(constraint).deep_copy()
        n_vocab = self._vocabulary.vocab_size
        request.matcher = Matcher(form, request.n_prompt, n_vocab, frozenset(self._spec.eos_token_ids), self._vocabulary)
        self.used = True

    def look_ahead(self, requests: Iterable[Request]) -> None:
        """Find in a thread what may follow in those of ``requests`` that have a form. Their tokens must not change before each
        matcher is asked."""
        wanted = [(request.matcher, request.tokens) for request in requests if isinstance(request.matcher, Matcher)]
        if not wanted:
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "grammars")

        def look() -> None:
            for matcher, tokens in wanted:
                matcher.look_in_thread(tokens)

        ahead = self._executor.submit(look)
        for matcher, _ in wanted:
            matcher.ahead = ahead

    def _read_vocabulary(self) -> Any:
        ends = self._spec.eos_token_ids
        if not ends:
            raise InputError("this model names no end token, so an answer of a given form could not end.", field="constraint")
        make = grammars.library().LLTokenizer
        tokenizer = load_tokenizer(self._directory)
        # Rows of the embedding without a token are never allowed; tokens beyond it are never asked for.
        n_vocab = max(self._spec.vocab_size, 1 + max(tokenizer.get_vocab().values()))
        try:
            return make(tokenizer.to_str(), n_vocab=n_vocab, eos_token=list(ends))
        except BaseException as error:
            raise DataError(
                f"answers of a given form cannot be had with the tokenizer in {self._directory}: {library_error(error)}."
            ) from None
