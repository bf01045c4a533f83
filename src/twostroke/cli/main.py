"""Entry point of ``twostroke``. Finds the verb, imports only that verb's file, and turns every error into a sentence."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from functools import lru_cache
from typing import Any

import typer

from twostroke.cli.console import emit_error
from twostroke.cli.typed import UsageError, as_typed, command_of, other_remedy, refuse_empty, typed_words, usage_sentence
from twostroke.core.contention import looking
from twostroke.core.errors import InputError, TwostrokeError, did_you_mean
from twostroke.core.openmp import limit_spinning
from twostroke.core.torch_warnings import hush
from twostroke.core.version import __version__

VERBS: dict[str, str] = {
    "doctor": "What this machine has, what is missing, and how to mend it.",
    "calibrate": "Measure this machine once and store its profile.",
    "plan": "Predict memory, time, energy and money, before any work.",
    "data": "Prepare text into token shards.",
    "tokenizer": "Train a byte-level BPE tokenizer.",
    "import": "Bring in a model: Hugging Face, GGUF or llama2.c.",
    "train": "Train a model by a TOML recipe.",
    "sweep": "Train a grid of recipes, and rank them by their score.",
    "watch": "Serve a live page of a training run.",
    "eval": "Score a model on held-out text and on tasks.",
    "score": "Log-probabilities of texts, as a server returns them.",
    "exits": "Find when tokens may leave at an earlier layer.",
    "quantize": "Write a copy of a model with its matrices in fewer bits.",
    "export": "Write a model for other programs, adapters merged.",
    "generate": "Continue prompts on this machine, without a server.",
    "chat": "Converse with a model here, or with a server.",
    "batch": "Compute a file of requests, and go on after a crash.",
    "serve": "Serve a model over an OpenAI-compatible interface.",
    "route": "Route requests to the server that will answer first.",
    "bench": "Send load and measure latency and throughput.",
    "ab": "What a server's A/B test found: latency, ratings, cost.",
    "compare": "Two models side by side: quality, speed, cost, size.",
    "card": "Write a model's card from what was measured here.",
    "ledger": "Predictions and measurements of every run.",
    "demo": "The whole path once, from calibration to a report.",
}
"""Each verb lives in ``twostroke.cli.<verb>_verb`` and exports ``app``, a ``typer.Typer``. The sentence is its line in the list
of verbs: at most 60 characters, so that none is cut in 80 columns."""


WRONG_PATH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES})
"""What the system says of a path: bad input where it is one that was typed."""


class _CtrlC(Exception):
    """A KeyboardInterrupt, which Typer would end silently with exit code 130."""


@lru_cache(maxsize=len(VERBS))
def _command(verb: str) -> Any:
    """The command of one verb, built once: click asks for it several times."""
    module = importlib.import_module(f"twostroke.cli.{verb}_verb")
    module.app.rich_markup_mode = None  # plain help: no boxes in pipes and logs, and rich stays unimported
    command = typer.main.get_command(module.app)
    command.name = verb
    command.help = command.help or VERBS[verb]
    command.short_help = VERBS[verb]
    return command


class VerbGroup(typer.core.TyperGroup):
    """Imports a verb's module only when that verb is asked for: `twostroke plan` must not pay for torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in VERBS else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _CtrlC from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            ctx.fail(f"no verb {args[0]!r}. {did_you_mean(args[0], VERBS)}")
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"twostroke {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=VerbGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Plan, train and serve language models, knowing the cost before and the truth after.

    Start with `twostroke doctor`, then `twostroke demo`. Step by step: calibrate, plan train RECIPE, train RECIPE,
    quantize MODEL DIRECTORY, serve DIRECTORY, ledger report.

    Every command takes --json: one JSON document on stdout, progress and logs on stderr. Exit codes: 0 done, 1 failed,
    2 bad input, 75 stopped by a signal after a checkpoint, 130 stopped by Ctrl-C.
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit. A deliberate error prints one sentence; with --json, a JSON object with it as well."""
    args = sys.argv[1:] if argv is None else argv
    looking()
    limit_spinning(os.environ)  # for every verb, so that one verb's measurements hold for the others
    hush(os.environ)
    group = typer.main.get_command(app)
    try:
        refuse_empty(group, args)
        code = group.main(args=args, prog_name="twostroke", standalone_mode=False)  # Typer would show its own errors otherwise
        sys.exit(code if isinstance(code, int) else 0)
    except TwostrokeError as error:
        sentence = as_typed(str(error), group, args) + other_remedy(error, group, args)
        emit_error(sentence, as_json="--json" in args, is_told=error.is_told)
        sys.exit(error.exit_code)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            emit_error(usage_sentence(error, group, args), as_json="--json" in args)
        sys.exit(InputError.exit_code)
    except (_CtrlC, KeyboardInterrupt, typer.Abort):
        emit_error("stopped by Ctrl-C.", as_json="--json" in args)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has closed it
        sys.exit(1)
    except OSError as error:
        is_wrong = error.errno in WRONG_PATH and any(
            w.value == str(error.filename) for w in typed_words(*command_of(group, args))
        )
        remedy = " Check the path." if is_wrong else ""
        emit_error(f"{error.filename or 'operating system'}: {error.strerror or error}.{remedy}", as_json="--json" in args)
        sys.exit(InputError.exit_code if is_wrong else 1)
