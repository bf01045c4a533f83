"""Commands have the engine's options by being declared to take its settings, and the options give the settings back."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from twostroke.cli.engine_options import FROM_OPTIONS, OPTIONS, with_engine_options, words
from twostroke.core.engine_settings import EngineSettings


def settings_of(arguments: list[str]) -> EngineSettings:
    """What a command between whose other options the engine's stand is given."""
    app, found = typer.Typer(), []

    @app.command()
    @with_engine_options
    def run(
        model: Path = typer.Argument(), engine: EngineSettings = FROM_OPTIONS, last: bool = typer.Option(False, "--last")
    ) -> None:
        found.append((model, engine, last))

    result = CliRunner().invoke(app, ["m", *arguments, "--last"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    ((model, engine, last),) = found
    assert (model, last) == (Path("m"), True)
    return engine


def test_no_option_is_the_default_of_every_setting() -> None:
    assert settings_of([]) == EngineSettings()


def test_words_of_settings_give_them_back() -> None:
    given = EngineSettings(
        "int8",
        head_dtype="fp32",
        kv_dtype="int8",
        max_model_len=99,
        kv_cache_bytes=3 * 2**28 + 4096,
        max_running=7,
        token_budget=70,
        max_step_ratio="1.5",
        n_threads=3,
        lora_memory_bytes=2**29,
        kv_dir="a folder",
        kv_dir_bytes=2**31,
        speculate="ngram",
        early_exit="at:0.5",
        pin_threads="nodes",
        huge_pages="on",
        deterministic=True,
    )
    assert set(given.changed()) == set(OPTIONS)
    assert settings_of(words(given)) == given
    assert words(EngineSettings()) == []


def test_memory_is_given_in_gib() -> None:
    assert settings_of(["--kv-cache-gib", "0.5"]).kv_cache_bytes == 2**29


def test_every_verb_that_runs_the_engine_has_all_its_options() -> None:
    from twostroke.cli import bench_verb, generate_verb, score_verb, serve_verb

    for app in (bench_verb.app, generate_verb.app, score_verb.app, serve_verb.app):
        for command in app.registered_commands:
            shown = CliRunner().invoke(app, [*([command.name or ""] if len(app.registered_commands) > 1 else []), "--help"])
            assert all(str(setting.option) in shown.output for setting in OPTIONS.values()), command.name
