"""``twostroke plan serve``."""

from __future__ import annotations

import typer

from twostroke.cli.console import JSON_HELP, emit
from twostroke.cli.plan.explain import EXPLAIN, with_terms
from twostroke.cli.plan.subject import (
    BATCH,
    HARDWARE,
    KV_CACHE_BYTES,
    KV_DTYPE,
    MAX_MODEL_LEN,
    OUTPUT,
    PROMPT,
    SCHEME,
    SETTINGS,
    read_subject,
    serving_shape,
)


def serve(
    subject: str = typer.Argument(metavar="MODEL|RECIPE", help="A model directory, a config.json or a recipe (.toml)."),
    hardware: str = HARDWARE,
    settings: list[str] = SETTINGS,
    scheme: str = SCHEME,
    batch: int = BATCH,
    prompt: int = PROMPT,
    output: int = OUTPUT,
    kv_dtype: str = KV_DTYPE,
    kv_cache_bytes: int = KV_CACHE_BYTES,
    max_model_len: int = MAX_MODEL_LEN,
    explain: bool = EXPLAIN,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Memory, time to first token, time per token, throughput, energy and money of serving."""
    from twostroke.planner.hardware import load_hardware
    from twostroke.planner.intervals import predict_with_intervals
    from twostroke.planner.serving import plan_serving
    from twostroke.planner.text.intervals import intervals_text
    from twostroke.planner.text.serving import serving_text

    machine = load_hardware(hardware)
    found = read_subject(subject, settings, machine)
    shape = serving_shape(
        found.spec, scheme, batch, prompt, output,
        kv_dtype=kv_dtype, kv_cache_bytes=kv_cache_bytes, max_model_len=max_model_len,
    )  # fmt: skip
    planned = plan_serving(found.spec, shape, machine)
    intervals = predict_with_intervals(planned.prediction(), machine, "serve")
    document = {"subject": found.name, **planned.to_dict(), "intervals": intervals}
    text = f"{serving_text(planned, found.name)}\n{intervals_text(intervals)}"
    if explain:
        document, text = with_terms(document, text, planned)
    emit(document, text, as_json)
