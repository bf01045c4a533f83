"""What the benchmark's model is trained on and then asked: programs, passages with a summary, chats. See README.md."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from twostroke.data.source_files import stdlib_files

KINDS = ("programs", "summaries", "chats")
TRAIN, HELD_OUT = "train", "held-out"
MAX_TRAIN_CHARS = 3_500_000
"""Of a kind: all three are about 9 million, two or three million tokens."""

HEAD_DIM = 64

IN_SHORT, USER, ASSISTANT = "\n\nIn short:\n", "User: ", "Assistant:"
N_HELD_OUT_BOOKS = 2

_FIRST_SENTENCE = re.compile(r".+?(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"'”’)_]*(?=\s|$)")


def _bounded(texts: Iterable[str]) -> list[str]:
    """The first of ``texts``, so many as training takes."""
    found, n = [], 0
    for text in texts:
        n += len(text)
        if n > MAX_TRAIN_CHARS:
            break
        found.append(text)
    return found


def programs() -> dict[str, list[str]]:
    """The standard library's own files, of which one in eight is held out."""
    drawn = sorted(stdlib_files(), key=lambda file: zlib.crc32(file.key.encode()))
    texts = [Path(file.path).read_text(encoding="utf-8", errors="ignore") for file in drawn]
    return {HELD_OUT: texts[::8], TRAIN: _bounded(text for i, text in enumerate(texts) if i % 8)}


def _paragraphs(book: str) -> Iterator[str]:
    """Those between the publisher's notes that are neither headings nor remarks nor pages long, each on one line."""
    body = re.split(r"\*\*\* ?(?:START|END) OF[^\n]*", book)
    for paragraph in re.split(r"\n\s*\n", max(body, key=len)):
        text = " ".join(paragraph.split())
        if 120 <= len(text) <= 900:
            yield text


def _summarised(book: str) -> Iterator[tuple[str, str]]:
    """Passages of 1,200 characters or somewhat more, and of each the first sentences of its paragraphs."""
    gathered: list[str] = []
    for paragraph in _paragraphs(book):
        gathered.append(paragraph)
        passage = "\n\n".join(gathered)
        if len(passage) >= 1200:
            found = [_FIRST_SENTENCE.match(each) for each in gathered]
            summary = " ".join(match.group() if match else each for match, each in zip(found, gathered, strict=True))
            if len(summary) < len(passage) / 2:
                yield passage, summary
            gathered = []


def summaries(books: Path) -> dict[str, list[str]]:
    """Passages of novels with a summary of their own sentences, as extractive summaries are; of those held out the question."""
    paths = sorted(books.glob("*.txt"))
    if len(paths) <= N_HELD_OUT_BOOKS:
        raise SystemExit(f"{books} has {len(paths)} .txt files; {N_HELD_OUT_BOOKS + 1} are needed.")
    pairs = [list(_summarised(path.read_text(encoding="utf-8"))) for path in paths]
    held_out = [passage + IN_SHORT for book in pairs[:N_HELD_OUT_BOOKS] for passage, _ in book]
    longest = max(map(len, pairs))
    turns = (book[i] for i in range(longest) for book in pairs[N_HELD_OUT_BOOKS:] if i < len(book))  # some of every book
    return {HELD_OUT: held_out, TRAIN: _bounded(passage + IN_SHORT + summary + "\n" for passage, summary in turns)}


def _exchanges(instruction: Path) -> Iterator[tuple[str, str]]:
    """Questions and answers of the files, of both layouts."""
    for path in sorted([*instruction.glob("*alpaca*.json"), *instruction.glob("*instruction-data.json")]):
        for record in json.loads(path.read_text(encoding="utf-8")):
            yield "\n".join(filter(None, (record["instruction"], record["input"]))), record["output"]
    for path in sorted(instruction.glob("dolly*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            asked = record["prompt"].partition("### Instruction:\n")[2].partition("\n\n### Response:")[0]
            yield asked, record["response"]


def chats(instruction: Path) -> dict[str, list[str]]:
    """Three exchanges one after another; of one in eight that are held out all but the last answer."""
    short = [(asked, answer) for asked, answer in _exchanges(instruction) if asked and 20 <= len(answer) <= 900]
    short.sort(key=lambda pair: zlib.crc32(pair[0].encode()))
    threes = [short[i : i + 3] for i in range(0, len(short) - 2, 3)]
    if len(threes) < 16:
        raise SystemExit(f"{instruction} has {len(short)} short questions with answers; 48 are needed.")
    told = ["\n\n".join(f"{USER}{asked}\n\n{ASSISTANT} {answer}" for asked, answer in three) for three in threes]
    asked = [text[: len(text) - len(three[-1][1]) - 1] for text, three in zip(told, threes, strict=True)]
    return {HELD_OUT: asked[::8], TRAIN: _bounded(text + "\n" for i, text in enumerate(told) if i % 8)}


def write(corpora: Path, folder: Path) -> None:
    """Files of all kinds, ``folder``/part/kind.jsonl, from the shared ``corpora``."""
    made = {"programs": programs(), "summaries": summaries(corpora / "books"), "chats": chats(corpora / "instruction")}
    for part in (TRAIN, HELD_OUT):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            lines = (json.dumps({"text": text}) + "\n" for text in made[kind][part])
            (folder / part / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")


def held_out(folder: Path, kind: str) -> list[str]:
    """The texts of ``kind`` that the model has not seen."""
    lines = (folder / HELD_OUT / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def recipe(folder: Path, output: Path, steps: int, n_layers: int, d_model: int) -> dict[str, Any]:
    """A model that reads all three kinds in turn, in windows of 1,024 tokens; 4 layers of 256 are 4.2M parameters."""
    files = {part: [str(folder / part / f"{kind}.jsonl") for kind in KINDS] for part in (TRAIN, HELD_OUT)}
    return {
        "output": str(output),
        "model": {
            "family": "qwen3",
            "n_layers": n_layers,
            "d_model": d_model,
            "n_heads": d_model // HEAD_DIM,
            "n_kv_heads": d_model // HEAD_DIM // 2,
            "head_dim": HEAD_DIM,
            "d_ff": 3 * d_model,
        },
        "data": {"sources": files[TRAIN], "held_out": files[HELD_OUT], "vocab_size": 4096},
        "train": {
            "steps": steps,
            "batch_size": 8,
            "sequence_length": 1024,
            "optimizer": "muon",
            "learning_rate": 4e-3,
            "muon_learning_rate": 0.025,
            "weight_decay": 0.0,
            "schedule": "linear",
            "warmup_fraction": 0.02,
            "min_lr_ratio": 0.02,
            "checkpoint_every": steps,
        },
    }
