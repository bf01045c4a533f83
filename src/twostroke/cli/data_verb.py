"""``twostroke data prepare`` turns text into token shards, and ``twostroke data show`` shows them."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log, progress
from twostroke.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from twostroke.core.data_recipe import DataRecipe
    from twostroke.planner.truth.recording import Planned

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Prepare text into token shards, and look at them.")

_FORMATS = (
    "Files, folders or globs (.txt .md .py .jsonl .parquet, .json for conversations; .gz and .zst), a directory that "
    'datasets\' save_to_disk wrote, hf:owner/name[:config][:split], or "stdlib".'
)


@app.callback()
def data() -> None:
    """Prepare text into token shards, and look at them."""


@app.command(short_help="Choose captured chats by their ratings.")
def rated(
    folder: Path = typer.Argument(help="Folder of `serve --capture`."),
    out: Path = typer.Argument(help="The .jsonl file to write."),
    least: float = typer.Option(None, help="Keep answers rated at least so, from -1 to 1. Default: all, rated or not."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Choose captured chats by their ratings, without those that a later one repeats. Train on it with layout="messages"."""
    from twostroke.data.captured import choose_rated

    chosen = choose_rated(folder, out, least)
    text = (
        f"{out}: {chosen.written} of {chosen.read} chats ({chosen.unrated} unrated, {chosen.rated_lower} rated lower, "
        f"{chosen.continued} continued by a later one)"
    )
    emit(chosen, text, as_json)


@app.command()
def prepare(
    sources: list[str] = typer.Argument(help=_FORMATS),
    layout: str = typer.Option(
        "text", help="What a record is: text, or a conversation as messages, alpaca, sharegpt or prompt."
    ),
    vocab_size: int = typer.Option(4096, help="Entries of the tokenizer trained on the text."),
    tokenizer: str = typer.Option(None, help="Use this tokenizer.json, or the one in this directory, instead of training one."),
    chat_template: str = typer.Option(
        None, help="A Jinja file that renders conversations instead of the model's own template."
    ),
    held_out: list[str] = typer.Option([], help="Hold out these sources instead of a share of the others. Repeatable."),
    held_out_fraction: float = typer.Option(0.1, help="Share of documents to hold out, chosen by a hash of their path."),
    text_key: str = typer.Option("text", help="The key or column of a record that holds its text."),
    dedup: str = typer.Option(
        "exact", help="Leave out documents equal to an earlier one (exact), near ones too (near), or none."
    ),
    near_threshold: float = typer.Option(
        0.8, help="Share of shingles (24 bytes) that near-duplicates have in common, 0.5 to 1."
    ),
    min_chars: int = typer.Option(0, help="Leave out documents with fewer characters."),
    max_chars: int = typer.Option(0, help="Leave out documents with more characters. 0: no limit."),
    max_repeated_lines: float = typer.Option(1.0, help="Leave out documents of which repeated lines are a greater share."),
    max_top_ngram: float = typer.Option(1.0, help="… of which the most frequent 12 bytes are a greater share."),
    max_symbols: float = typer.Option(
        1.0, help="… whose visible characters are to a greater share neither letters nor digits."
    ),
    min_mean_word: float = typer.Option(0.0, help="… whose words have fewer letters and digits on average."),
    max_mean_word: float = typer.Option(0.0, help="… whose words have more letters and digits on average. 0: no limit."),
    out: Path = typer.Option(None, help="Directory to write. Default: one in the cache, made or reused."),
    verify: bool = typer.Option(False, help="Also read every shard found and check its sha256."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Tokenise text into memory-mapped shards with a held-out part. Shards of the same text and options are reused."""
    from twostroke.core.data_recipe import REUSED
    from twostroke.core.recipe import data_recipe_from_dict
    from twostroke.data.prepare import prepare as prepare_data
    from twostroke.data.sources import find_documents
    from twostroke.planner.truth.recording import recording

    recipe = data_recipe_from_dict(
        {
            "sources": sources,
            "layout": layout,
            "vocab_size": vocab_size,
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "held_out": held_out,
            "held_out_fraction": held_out_fraction,
            "text_key": text_key,
            "dedup": dedup,
            "near_threshold": near_threshold,
            "min_chars": min_chars,
            "max_chars": max_chars,
            "max_repeated_lines": max_repeated_lines,
            "max_top_ngram": max_top_ngram,
            "max_symbols": max_symbols,
            "min_mean_word": min_mean_word,
            "max_mean_word": max_mean_word,
        }
    )
    n_bytes = 0
    if recipe.layout == "text":  # refuses what is not there before anything is told
        n_bytes = find_documents((*recipe.sources, *recipe.held_out), text_key).n_file_bytes
    notes: list[str] = []
    with recording("prepare", ", ".join(sources), vars(recipe), functools.partial(_planned, recipe, n_bytes), log) as run:
        began = time.perf_counter()
        with progress("preparing data", 1.0) as advance:

            def tell(done: float, note: str) -> None:
                notes.append(note)
                advance(done, note)

            prepared = prepare_data(recipe, progress=tell, out=out)
        seconds = time.perf_counter() - began
        is_made = notes[-1] != REUSED
        run.measure({"prepare_s" if is_made else "reused_s": seconds}, why={"prepare_s": "the data was there already."})
    if verify:
        prepared.verify()
    document: dict[str, Any] = {
        "directory": str(prepared.directory),
        "tokenizer": str(prepared.tokenizer_path),
        "vocab_size": prepared.vocab_size,
        "eos_id": prepared.eos_id,
        "n_train_tokens": prepared.n_train_tokens,
        "n_heldout_tokens": prepared.n_heldout_tokens,
        "n_heldout_bytes": prepared.n_heldout_bytes,
        "n_heldout_documents": prepared.n_heldout_documents,
        "report": prepared.report,
        "run_id": run.run_id,
        "prediction": run.prediction,
        "elapsed_s": seconds,
    }
    emit(document, _text(document, prepared.holds_conversations), as_json)


def _planned(recipe: DataRecipe, n_bytes: int) -> Planned:
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.training.preparing import recipe_s
    from twostroke.planner.truth.recording import Planned

    hardware = load_hardware("this", "train")
    return Planned({"prepare_s": recipe_s(recipe, n_bytes, hardware)}, hardware)


@app.command()
def show(
    directory: Path = typer.Argument(help="A directory that `twostroke data prepare` made."),
    n: int = typer.Option(3, "--n", help="How many documents.", min=1, max=1000),
    held_out: bool = typer.Option(False, "--held-out", help="Show the held-out part instead of the training part."),
    tokens: int = typer.Option(120, help="How much of each, in tokens.", min=1, max=100_000),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Show the beginnings of some documents as a model will read them. In conversations « and » enclose what is learned."""
    from twostroke.data.excerpts import excerpts
    from twostroke.data.shards import open_prepared

    prepared = open_prepared(directory)
    split = "heldout" if held_out else "train"
    found = list(excerpts(prepared, split, n, tokens))
    document = {
        "directory": str(directory),
        "split": split,
        "excerpts": [
            {
                "first_token": e.first_token,
                "n_tokens": e.n_tokens,
                "is_whole": e.is_whole,
                "parts": [{"text": text, "is_learned": learned} for text, learned in e.parts],
            }
            for e in found
        ],
    }
    part = "held-out" if held_out else "training"
    total = prepared.n_heldout_tokens if held_out else prepared.n_train_tokens
    lines = [f"{len(found)} of the {part} part's documents, spaced over its {format_count(total)} tokens"]
    for e in found:
        lines.append(
            f"\n─── token {e.first_token:,}: a document of {e.n_tokens:,} tokens{'' if e.is_whole else ', its beginning'}"
        )
        marked = prepared.holds_conversations
        lines.append("".join(f"«{text}»" if learned and marked else text for text, learned in e.parts).rstrip("\n"))
    emit(document, "\n".join(lines), as_json, verbatim=True)


_REASONS = {
    "duplicate": "equal to an earlier one",
    "near_duplicate": "nearly equal to an earlier one",
    "copy_of_held_out": "equal to a held-out one",
    "too_short": "shorter than --min-chars",
    "too_long": "longer than --max-chars",
    "repeated_lines": "over --max-repeated-lines",
    "repeated_ngram": "over --max-top-ngram",
    "symbols": "over --max-symbols",
    "short_words": "under --min-mean-word",
    "long_words": "over --max-mean-word",
}


def _text(d: dict[str, Any], holds_conversations: bool) -> str:
    r = d["report"]
    lines = _conversation_lines(d, r) if holds_conversations else _document_lines(d, r)
    if len(r["sources"]) > 1:
        lines += ["", *_source_lines(r["sources"])]
    return "\n".join([*lines, "", f"in {d['directory']}", f"look at it: twostroke data show {d['directory']}"])


def _row(name: str, n: int, what: str = "", *more: str) -> str:
    return f"{name:<12}{n:>9,} {what:<15}{''.join(f'{m:<18}' for m in more)}".rstrip()


def _document_lines(d: dict[str, Any], r: dict[str, Any]) -> list[str]:
    left_out, pieces = r["left_out"], r.get("pieces_left_out", {})
    n_out, n_out_bytes = (sum(counts[key] for counts in left_out.values()) for key in ("n_documents", "n_bytes"))
    lines = [_row("read", r["n_files"], "files")]
    if r["n_other_files"]:
        lines.append(_row("", r["n_other_files"], "files of other formats were not read"))
    lines.append(_row("found", r["n_documents"] + n_out, "documents", format_bytes(r["n_bytes"] + n_out_bytes)))
    lines += _left_out_lines(left_out, "documents")
    if r["n_empty"]:
        lines.append(_row("left out", r["n_empty"], "empty files or records"))
    train_bytes, held_bytes = format_bytes(r["n_train_bytes"]), format_bytes(d["n_heldout_bytes"])
    lines += [
        _row("training", r["n_train_documents"], "documents", train_bytes, f"{d['n_train_tokens']:,} tokens"),
        _row("held out", d["n_heldout_documents"], "documents", held_bytes, f"{d['n_heldout_tokens']:,} tokens")
        + f"  ({100 * r['held_out_share']:.1f}%, {_split(r['split_by'])})",
    ]
    lines += _left_out_lines(pieces, "pieces")
    lines.append(_row("tokenizer", d["vocab_size"], "entries", f"{r['bytes_per_token']:.2f} bytes a token"))
    if r["invalid_utf8_bytes"]:
        where = f"{r['invalid_utf8_documents']} documents"
        lines.append(f"{r['invalid_utf8_bytes']} bytes in {where} were not UTF-8 and were replaced by U+FFFD.")
    return lines


def _split(by: str) -> str:
    return "the sources that --held-out names" if by == "explicit" else f"chosen by a hash of each {by}'s path"


def _left_out_lines(left_out: dict[str, Any], what: str) -> list[str]:
    lines = []
    for reason, counts in left_out.items():
        shown = ", ".join(counts["examples"])
        more = ", …" if counts["n_documents"] > len(counts["examples"]) else ""
        line = _row("left out", counts["n_documents"], what, format_bytes(counts["n_bytes"]), _REASONS[reason])
        lines.append(f"{line}: {shown}{more}" if shown else line)
    return lines


def _conversation_lines(d: dict[str, Any], r: dict[str, Any]) -> list[str]:
    lines = [_row("read", r["n_files"], "files")]
    if r["n_other_files"]:
        lines.append(_row("", r["n_other_files"], "files of other formats were not read"))
    lines.append(_row("found", r["n_conversations"], "conversations"))
    if r["n_without_answer"]:
        lines.append(_row("left out", r["n_without_answer"], "without an answer by an assistant"))
    lines += _left_out_lines(r["left_out"], "conversations")
    if r["n_duplicates"]:
        lines.append(_row("left out", r["n_duplicates"], "conversations", "equal to an earlier one"))
    for name, part in (("training", "train"), ("held out", "heldout")):
        tokens, learned = d[f"n_{part}_tokens"], r[f"n_{part}_learned_tokens"]
        of_these = f"{learned:,} of them learned ({100 * learned / max(1, tokens):.0f}%)"
        lines.append(_row(name, r[f"n_{part}_conversations"], "conversations", f"{tokens:,} tokens", of_these))
    if r["n_unlearned_answers"]:
        lines.append(_row("", r["n_unlearned_answers"], "earlier answers are not learned: the template changes them later"))
    template = "the plain default, as the tokenizer's directory has none" if r["template"] == "plain default" else "own"
    return [*lines, f"{'template':<22}{template}", _row("tokenizer", d["vocab_size"], "entries")]


def _source_lines(sources: list[dict[str, Any]]) -> list[str]:
    total = max(1, sum(s["n_tokens"] for s in sources))
    rows = [
        f"{s['n_tokens']:>14,} tokens {100 * s['n_tokens'] / total:>6.1f}%  {s['n_documents']:>9,} documents  {s['source']}"
        for s in sources
    ]
    return ["training part by source", *rows]
