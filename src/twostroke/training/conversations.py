"""What a run on conversations does otherwise than one on text: its loader, and the template that goes with its model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from twostroke.core.recipe import TrainRecipe
from twostroke.data.background import PREFETCHED_BATCHES, BackgroundLoader
from twostroke.data.conversation_loader import ConversationLoader
from twostroke.data.loader import MixedSource, PackedLoader, ShuffledLoader, mixed_sources
from twostroke.data.shards import PreparedData

Log = Callable[[str], None]


def make_loader(prepared: PreparedData, recipe: TrainRecipe, log: Log) -> BackgroundLoader:
    """Windows over a stream of documents, or rows of whole conversations, mixed by the recipe's weights where it gives some,
    and prepared in the background. ``log`` hears what became of conversations too long, and how long the sources last.

    Raises DataError where nothing fits into a sequence.
    """
    settings = recipe.train
    mixture = mixed_sources(prepared, recipe.data.weights)
    loader: ShuffledLoader
    if prepared.holds_conversations:
        loader = _conversation_loader(prepared, recipe, mixture, log)
    else:
        loader = PackedLoader(prepared, settings.batch_size, settings.sequence_length, recipe.seed, mixture)
    if loader.mixture is not None:
        shares = zip(mixture, loader.mixture.shares, loader.source_windows, strict=True)
        parts = ", ".join(f"{s.name} {100 * share:.4g}% (an epoch is {n} windows)" for s, share, n in shares)
        log(f"mixture: {parts}.")
    # A window of accumulation is taken at once: all of it is prepared ahead.
    return BackgroundLoader(loader, recipe.data.workers, max(PREFETCHED_BATCHES, settings.grad_accumulation))


def _conversation_loader(
    prepared: PreparedData, recipe: TrainRecipe, mixture: Sequence[MixedSource], log: Log
) -> ConversationLoader:
    settings = recipe.train
    loader = ConversationLoader(
        prepared, settings.batch_size, settings.sequence_length, recipe.seed, recipe.data.too_long, mixture
    )
    fitting, report = loader.fitting, prepared.report
    log(
        f"{fitting.n_conversations} conversations in {fitting.n_rows} rows of {settings.sequence_length} tokens, "
        f"{100 * fitting.filled:.1f}% filled; rendered by the {_template(recipe, report['template'])}."
    )
    if fitting.n_cut or fitting.n_dropped:
        log(
            f"{fitting.n_cut} conversations longer than train.sequence_length={settings.sequence_length} were cut there; "
            f"{fitting.n_dropped} were left out, as they are too long or hold no answer before the cut."
        )
    if report["n_without_answer"] or report["n_duplicates"] or report["n_unlearned_answers"]:
        log(
            f"{report['n_without_answer']} conversations without an answer and {report['n_duplicates']} duplicates were left "
            f"out; {report['n_unlearned_answers']} earlier answers are not learned, as the template changes them later."
        )
    return loader


def _template(recipe: TrainRecipe, found: str) -> str:
    if recipe.data.chat_template is not None:
        return f"template {recipe.data.chat_template}"
    return "model's own template" if found == "own" else "plain default template, as the model has none"


def write_chat_template(recipe: TrainRecipe, directory: Path) -> None:
    """The recipe's own template into the model's directory, so that it is served as it was trained."""
    if recipe.data.chat_template is not None:
        shutil.copyfile(Path(recipe.data.chat_template).expanduser(), directory / "chat_template.jinja")
