"""The parts of a run that differ for text and conversations: its loader, and the chat template of its model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from twostroke.core.recipe import TrainRecipe
from twostroke.data.background import PREFETCHED_BATCHES, BackgroundLoader
from twostroke.data.conversation_loader import ConversationLoader
from twostroke.data.loader import MixedSource, PackedLoader, ShuffledLoader, mixed_sources
from twostroke.data.shards import PreparedData
from twostroke.training.ranks import ALONE, Ranks

Log = Callable[[str], None]


def make_loader(prepared: PreparedData, recipe: TrainRecipe, log: Log, ranks: Ranks = ALONE) -> BackgroundLoader:
    """A loader of windows over documents, or of rows of whole conversations, that prefetches in the background. If the recipe
    gives weights, sources are mixed by them. The number of cut conversations and the length of an epoch are logged. Of each
    step's micro-batches it hands out those of this rank.

    Raises DataError if nothing fits into a sequence.
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
    own = ranks.micro_batches(settings.grad_accumulation)
    loader.share_out(own, settings.grad_accumulation)
    # A step takes a whole accumulation window at once, so that many batches are prefetched.
    return BackgroundLoader(loader, recipe.data.workers, max(PREFETCHED_BATCHES, len(own)))


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
            f"{fitting.n_dropped} were left out, because they are too long or have no answer before the cut."
        )
    if report["n_without_answer"] or report["n_duplicates"] or report["n_unlearned_answers"]:
        log(
            f"{report['n_without_answer']} conversations without an answer and {report['n_duplicates']} duplicates were left "
            f"out; {report['n_unlearned_answers']} earlier answers are not learned, because the template renders them "
            "differently "
            "later."
        )
    return loader


def _template(recipe: TrainRecipe, found: str) -> str:
    if recipe.data.chat_template is not None:
        return f"template {recipe.data.chat_template}"
    return "model's own template" if found == "own" else "plain default template, because the model has no template"


def write_chat_template(recipe: TrainRecipe, directory: Path) -> None:
    """Copy the recipe's template into the model's directory, so that the model is served as it was trained."""
    if recipe.data.chat_template is not None:
        shutil.copyfile(Path(recipe.data.chat_template).expanduser(), directory / "chat_template.jinja")
