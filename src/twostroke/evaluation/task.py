"""Tasks: questions in a .jsonl file. A model answers with what it finds most probable, or with what it writes."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from twostroke.core.errors import ConfigError, DataError
from twostroke.evaluation.encoding import Encoder, Pair
from twostroke.evaluation.records import Record, read_records
from twostroke.evaluation.results import TaskResult, Values
from twostroke.evaluation.scorer import Progress, Scorer


@dataclass(frozen=True)
class Task(ABC):
    """``prompt`` and ``target`` are templates over a record (``records.Record.fill``), with ``delimiter`` between them.

    The first ``shots`` records are few-shot examples: they stand with their targets before each question, joined by
    ``shot_separator``, and are not scored. If ``shots_file`` is given, the examples come from it and all of ``file`` is scored.
    """

    kind: ClassVar[str]

    name: str
    file: Path
    prompt: str
    about: str = ""
    delimiter: str = " "
    shots: int = 0
    shots_file: Path | None = None
    shot_separator: str = "\n\n"

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise ConfigError(f"task {self.name}: shots={self.shots} must be at least 0.")

    @abstractmethod
    def answer(self, record: Record) -> str:
        """The text after the delimiter if the record is a few-shot example."""

    @abstractmethod
    def run(self, scorer: Scorer, limit: int | None = None, progress: Progress | None = None) -> TaskResult:
        """Score the first ``limit`` questions, or all. Raises DataError for a record that the task cannot read."""

    def questions(self, limit: int | None) -> tuple[list[Record], Callable[[Record], str], str]:
        """(records to score, function from a record to its whole prompt, key of these questions)."""
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} must be at least 1.")
        own = self.shots if self.shots_file is None else 0
        records = read_records(self.file, None if limit is None else limit + own)
        shown = records.rows[:own] if self.shots_file is None else read_records(self.shots_file, self.shots).rows
        if len(shown) < self.shots:
            raise DataError(
                f"task {self.name} shows {self.shots} examples and {self.shots_file or self.file} has {len(shown)}. Lower "
                "shots."
            )
        rows = records.rows[own:]
        if not rows:
            raise DataError(f"task {self.name}: all records of {self.file} are shown as examples. Lower shots={self.shots}.")
        parts = [record.fill(self.prompt) + self.delimiter + self.answer(record) for record in shown]
        before = "".join(part + self.shot_separator for part in parts)
        key = hashlib.sha256(f"{records.sha256} {len(rows)} {own} {self!r} {before}".encode()).hexdigest()
        return rows, lambda record: before + record.fill(self.prompt), key


@dataclass(frozen=True)
class ChoiceTask(Task):
    """The answer is the choice that the model finds most probable after the prompt.

    ``choices`` is the path of a list in the record, or a list of templates. ``gold`` is the path of the right choice: its index
    from 0, or a text that is one of ``labels`` (a path or a list) or of the choices. acc takes the largest sum of log p,
    acc_norm the largest sum per character of the choice, as lm-eval defines them. gold_nats is −log p of the right choice.
    """

    kind = "choice"
    choices: str | tuple[str, ...] = "choices"
    gold: str = "gold"
    labels: str | tuple[str, ...] | None = None

    def answer(self, record: Record) -> str:
        texts = self._choices(record)
        return texts[self._gold(record, texts)]

    def run(self, scorer: Scorer, limit: int | None = None, progress: Progress | None = None) -> TaskResult:
        records, prompt, key = self.questions(limit)
        encoder = Encoder(scorer)
        pairs: list[Pair] = []
        each: list[tuple[list[str], int]] = []
        for record in records:
            texts = self._choices(record)
            each.append((texts, self._gold(record, texts)))
            context = prompt(record)
            pairs += [encoder.pair(context, self.delimiter + text) for text in texts]
        scored = scorer.token_scores([(p.ids, p.first) for p in pairs], progress)
        sums = np.array([-float(nats.sum(dtype=np.float64)) for nats, _ in scored])
        right, right_norm, gold_nats = (np.zeros(len(records)) for _ in range(3))
        at = n_cut = 0
        for i, (texts, gold) in enumerate(each):
            own = sums[at : at + len(texts)]
            n_cut += any(p.n_cut for p in pairs[at : at + len(texts)])
            right[i] = int(np.argmax(own)) == gold
            right_norm[i] = int(np.argmax(own / np.array([len(text) for text in texts]))) == gold
            gold_nats[i] = -own[gold]
            at += len(texts)
        chance = float(np.mean([1 / len(texts) for texts, _ in each]))
        scores = {"acc": right, "acc_norm": right_norm, "gold_nats": gold_nats}
        return TaskResult(self.name, self.kind, key, scores, n_cut, sum(len(nats) for nats, _ in scored), chance)

    def _choices(self, record: Record) -> list[str]:
        texts = record.get(self.choices) if isinstance(self.choices, str) else [record.fill(t) for t in self.choices]
        if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(t, str) and t for t in texts):
            raise DataError(f"{record.where} must have a list of two or more texts as {self.choices!r}; it has {texts!r:.80}.")
        return texts

    def _gold(self, record: Record, texts: Sequence[str]) -> int:
        gold = record.get(self.gold)
        labels = record.get(self.labels) if isinstance(self.labels, str) else self.labels
        if isinstance(gold, int) and not isinstance(gold, bool) and labels is None:
            if not 0 <= gold < len(texts):
                raise DataError(f"{record.where} names choice {gold}, and it has {len(texts)} choices, counted from 0.")
            return gold
        known = list(texts if labels is None else labels)
        if known.count(gold) != 1 or len(known) != len(texts):
            raise DataError(f"{record.where}: {self.gold!r} is {gold!r}, which is not one of {known!r:.120}.")
        return known.index(gold)


@dataclass(frozen=True)
class MatchTask(Task):
    """acc is 1 if greedy decoding would write the target, that is if each of its tokens is the most probable one. target_nats
    is −log p of the target; perplexity is exp of its mean over examples, as in lm-eval's LAMBADA."""

    kind = "match"
    target: str = "{target}"

    def answer(self, record: Record) -> str:
        return record.fill(self.target)

    def run(self, scorer: Scorer, limit: int | None = None, progress: Progress | None = None) -> TaskResult:
        records, prompt, key = self.questions(limit)
        encoder = Encoder(scorer)
        pairs = [encoder.pair(prompt(record), self.delimiter + self._target(record)) for record in records]
        scored = scorer.token_scores([(p.ids, p.first) for p in pairs], progress)
        nats = np.array([float(own.sum(dtype=np.float64)) for own, _ in scored])
        right = np.array([float(greedy.all()) for _, greedy in scored])
        n_cut = sum(p.n_cut > 0 for p in pairs)
        scores = {"acc": right, "target_nats": nats}
        return TaskResult(self.name, self.kind, key, scores, n_cut, sum(len(own) for own, _ in scored))

    def _target(self, record: Record) -> str:
        target = record.fill(self.target)
        if not target:
            raise DataError(f"{record.where}: the target {self.target!r} is empty. A target must have text.")
        return target


@dataclass(frozen=True)
class Extract:
    """Finds the answer in a text: the first non-empty group of the ``which`` ("first" or "last") match of ``pattern``."""

    pattern: str
    which: str = "first"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ConfigError(f"pattern={self.pattern!r} is not a regular expression: {error}.") from None
        if self.which not in ("first", "last"):
            raise ConfigError(f"which={self.which!r} must be first or last.")

    def __call__(self, text: str) -> str | None:
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return None
        match = matches[0 if self.which == "first" else -1]
        return next((group for group in match.groups() if group), match.group(0))


_WHOLE = Extract(r"(?s)\s*(.*\S)\s*")


@dataclass(frozen=True)
class AnswerTask(Task):
    """The answer is what the model writes, decoded greedily. Each of ``extract`` finds the answer in text and target and gives
    a metric of its name: 1 if both are equal without commas, $, a final full stop and case.

    Without ``extract`` the whole texts must be equal (exact).
    """

    kind = "answer"
    target: str = "{target}"
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    extract: dict[str, Extract] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens < 1:
            raise ConfigError(f"task {self.name}: max_tokens={self.max_tokens} must be at least 1.")

    def answer(self, record: Record) -> str:
        return record.fill(self.target)

    def run(self, scorer: Scorer, limit: int | None = None, progress: Progress | None = None) -> TaskResult:
        records, prompt, key = self.questions(limit)
        encoder = Encoder(scorer)
        prompts, cuts = zip(*(encoder.prompt(prompt(record), self.max_tokens) for record in records), strict=True)
        texts = scorer.continue_greedily(prompts, self.max_tokens, self.stop, progress)
        scores: dict[str, Values] = {}
        for name, extract in (self.extract or {"exact": _WHOLE}).items():
            wanted = [self._wanted(record, extract, name) for record in records]
            found = [extract(text) for text in texts]
            scores[name] = np.array([f is not None and _plain(f) == w for f, w in zip(found, wanted, strict=True)], np.float64)
        return TaskResult(self.name, self.kind, key, scores, sum(n > 0 for n in cuts), sum(map(len, prompts)))

    def _wanted(self, record: Record, extract: Extract, name: str) -> str:
        target = record.fill(self.target)
        found = extract(target)
        if found is None:
            raise DataError(f"{record.where}: extract {name!r} finds no answer in the record's target {target!r:.80}.")
        return _plain(found)


def _plain(answer: str) -> str:
    return answer.replace(",", "").replace("$", "").strip().removesuffix(".").lower()


TASK_KINDS: dict[str, type[Task]] = {t.kind: t for t in (ChoiceTask, MatchTask, AnswerTask)}
