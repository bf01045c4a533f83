"""``twostroke chat`` converses with a model in this process, or with a server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from twostroke.cli.console import JSON_HELP, emit, log
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options
from twostroke.cli.opened_model import opened_model
from twostroke.core.adapter_names import LORA_HELP, adapters_of
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import ConfigError

if TYPE_CHECKING:
    from twostroke.cli.chat.local import LocalModel
    from twostroke.cli.chat.remote import RemoteModel

app = typer.Typer(add_completion=False)


@app.command(name="chat")
@with_engine_options
def chat(
    model: str = typer.Argument(help="Model directory, the output of a training run, a GGUF file, or the URL of a server."),
    system: str = typer.Option("", help="System prompt."),
    temperature: float = typer.Option(0.8, help="0 takes the most probable token each time."),
    top_p: float = typer.Option(0.95, help="Choose among the most probable tokens that sum to this probability."),
    max_tokens: int | None = typer.Option(None, help="Most tokens of each answer. Default: as many as the context holds."),
    seed: int | None = typer.Option(None, help="Makes answers repeatable. Default: a new seed each time."),
    lora: list[str] = typer.Option([], help=f"{LORA_HELP.removesuffix(' Repeatable.')} Of a model directory."),
    served_name: str = typer.Option("", help="Which model of the server answers. Default: the first that it lists."),
    api_key_file: Path | None = typer.Option(None, help="File with the server's key. Default: $TWOSTROKE_API_KEY."),
    engine: EngineSettings = FROM_OPTIONS,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Converse with a model in this process, or with a running server. /help lists what can be typed beside messages.

    Ctrl-C stops an answer, Ctrl-D ends. From a pipe each line is a message, and the answers go to stdout.
    """
    from twostroke.cli.chat.conversation import Conversation
    from twostroke.cli.chat.terminal import Chat, at_terminal, from_pipe

    conversation = Conversation(system)
    for name, value in (("temperature", temperature), ("top_p", top_p), ("max_tokens", max_tokens), ("seed", seed)):
        if value is not None:
            conversation.set(name, str(value))
    if sys.stdin is None:
        raise ConfigError("there is no stdin to read messages from.")
    if "://" in model:
        if lora or engine.changed():
            raise ConfigError(f"{model} runs already: --lora and the engine's options belong to `twostroke serve`.")
        answers: RemoteModel | LocalModel = _server(model, api_key_file, served_name)
    else:
        if api_key_file is not None or served_name:
            raise ConfigError("--api-key-file and --served-name are for a server's URL.")
        answers = _local(model, adapters_of(lora), engine)
    try:
        for note in answers.notes:
            log(note)
        if not answers.has_template:
            log(
                f"{answers.name} comes without a chat template: the conversation is written as lines `User: …`, `Assistant: …`."
            )
        talk = Chat(answers, conversation, prints=not as_json, at_terminal=sys.stdin.isatty())
        if sys.stdin.isatty():
            log(f"{answers.name}. /help lists the commands, Ctrl-D ends.")
            at_terminal(talk)
        else:
            from_pipe(talk)
    finally:
        answers.close()
    if as_json:
        emit({"model": answers.name, "messages": conversation.with_system(), "answers": talk.answers}, "", as_json=True)


def _server(url: str, api_key_file: Path | None, name: str) -> RemoteModel:
    from twostroke.cli.chat.remote import KEY_VARIABLE, RemoteModel
    from twostroke.server.keys import read_keys

    key = os.environ.get(KEY_VARIABLE, "") if api_key_file is None else read_keys(api_key_file)[0]
    return RemoteModel(url, key, name)


def _local(model: str, adapters: Mapping[str, Path], engine: EngineSettings) -> LocalModel:
    from twostroke.core.families import read_spec

    if len(adapters) > 1:
        raise ConfigError(f"{len(adapters)} adapters are named, and one conversation has one. Name one.")
    if not Path(model).exists() and re.fullmatch(r"[\w.-]+:\d+(/.*)?", model):
        raise ConfigError(f"model {model} does not exist. A server is named by its URL: http://{model}.")
    directory = opened_model(Path(model))
    read_spec(directory).require_buildable()  # before torch is imported, so that an unusable config.json is told at once
    from twostroke.cli.chat.local import LocalModel

    return LocalModel(directory, adapters, engine)
