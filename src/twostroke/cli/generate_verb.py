"""``twostroke generate`` continues prompts on this machine. Its prediction is frozen before, and measured after."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twostroke.cli.console import JSON_HELP, emit, log
from twostroke.cli.engine_options import FROM_OPTIONS, with_engine_options
from twostroke.cli.opened_model import opened_model
from twostroke.core.adapter_names import LORA_HELP, adapters_of
from twostroke.core.documents import read_json
from twostroke.core.engine_settings import OFF, EngineSettings
from twostroke.core.engines import weights_text
from twostroke.core.errors import ConfigError, InputError, TwostrokeError
from twostroke.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from twostroke.engine.achieved import Achieved
    from twostroke.engine.llm import LLM, RequestOutput
    from twostroke.engine.meters import EngineStats
    from twostroke.planner.truth.recording import Planned
    from twostroke.scheduling.sampling_params import SamplingParams

app = typer.Typer(add_completion=False)

STARTS = dict.fromkeys(("startup_s", "warm_startup_s"), "a start either packs the weights or finds them packed.")
UNMEASURED = {**STARTS, "e2e_s": "an answer ended before --max-tokens: less work than was predicted."} | dict.fromkeys(
    ("tpot_s", "decode_tok_per_s", "prefill_tok_per_s"), "no step of its kind was computed."
)
"""Reasons for which a predicted number is not measured."""
BEAMS_PLANNED = "beams are predicted as so many answers to one prompt: copies of pages are not planned."
UNMEASURED_BEAMS = {
    "ttft_s": "the first token of a beam search is known with the last.",
    "output_tok_per_s": "beams were computed that are not among the answers.",
}


@app.command(name="generate")
@with_engine_options
def generate(
    model: Path = typer.Argument(help="Model directory, the output of a training run, or a GGUF file."),
    prompt: list[str] = typer.Option([], help="Text to continue. Repeatable. Default: the text on stdin."),
    max_tokens: int = typer.Option(128, help="Most tokens of each answer."),
    temperature: float | None = typer.Option(None, help="0 takes the most probable token each time. Default: 0.8, of beams 0."),
    top_k: int = typer.Option(0, help="Choose among the k most probable tokens; 0: all."),
    top_p: float = typer.Option(0.95, help="Choose among the most probable tokens that sum to this probability."),
    min_p: float = typer.Option(0.0, help="Choose among tokens with at least this share of the highest probability."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1: tokens of prompt and answer become less probable."),
    presence_penalty: float = typer.Option(0.0, help="Subtracted from the logit of every token in the answer so far."),
    frequency_penalty: float = typer.Option(0.0, help="The same, times the number of its occurrences there."),
    n: int = typer.Option(1, "-n", "--n", help="Answers to each prompt. The prompt is computed once."),
    best_of: int | None = typer.Option(None, "--beams", help="Search with so many beams, and answer with the best of them."),
    length_penalty: float = typer.Option(1.0, help="Beams rank by log-probability over length to this power."),
    seed: int = typer.Option(None, help="Makes the answer repeatable. Default: a new seed each time."),
    stop: list[str] = typer.Option([], help="Text to end before. Repeatable."),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on after the model's end token."),
    json_schema: Path | None = typer.Option(None, help="File with a JSON schema. Answers are JSON that it allows."),
    regex: str | None = typer.Option(None, help="Regular expression that answers match as a whole."),
    lora: list[str] = typer.Option([], help=f"{LORA_HELP} One is for all prompts, several are for one prompt each."),
    engine: EngineSettings = FROM_OPTIONS,
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Continue prompts on this machine, without a server. Prints text as it is made, then how fast that was."""
    from twostroke.core.families import read_spec
    from twostroke.planner.truth.recording import recording
    from twostroke.scheduling.constraint import Constraint
    from twostroke.scheduling.sampling_params import SamplingParams

    directory = opened_model(model)
    read_spec(directory).require_buildable()  # before torch is imported, so that an unusable config.json is told at once
    if best_of is None and length_penalty != 1.0:
        raise ConfigError("--length-penalty needs --beams.")
    if best_of is not None and best_of < n:
        raise ConfigError(f"--beams {best_of} must be at least -n {n}.")
    if temperature is None:
        temperature = 0.8 if best_of is None else 0.0
    if json_schema is not None and regex is not None:
        raise ConfigError("--json-schema and --regex both give the answer's form. Give one of them.")
    constraint = None if regex is None else Constraint.regex(regex)
    if json_schema is not None:
        constraint = Constraint.json_schema(read_json(json_schema))
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_tokens, stop=tuple(stop),
        ignore_eos=ignore_eos, n=n, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, use_beam_search=best_of is not None, best_of=best_of,
        length_penalty=length_penalty, constraint=constraint,
    )  # fmt: skip
    prompts = list(prompt) or [_stdin()]
    adapters = adapters_of(lora)
    if len(adapters) > 1 and len(adapters) != len(prompts):
        raise ConfigError(f"{len(adapters)} adapters for {len(prompts)} prompts. Give one for all, or one for each.")
    named = [*adapters] if len(adapters) > 1 else next(iter(adapters), None)
    inputs = {"directory": str(directory.resolve()), "dtype": engine.dtype, "n_prompts": len(prompts)}
    inputs |= {"lora": [*adapters]} if adapters else {}
    if best_of is not None:
        inputs["beams"] = best_of
        log(BEAMS_PLANNED)
    inputs["speculate"] = engine.speculate
    if engine.early_exit != OFF:
        inputs["early_exit"] = engine.early_exit
    plan = functools.partial(_planned, directory, prompts, params, engine, adapters)
    run = recording("generate", directory.resolve().name, inputs, plan, log)
    began = time.perf_counter()
    # Idle OpenMP threads must sleep soon: while they spin, the thread that they wait for may have no core.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "300"
    with run:
        from twostroke.engine.achieved import achieved
        from twostroke.engine.llm import LLM

        llm = LLM(directory, adapters, **engine.changed())
        startup_s = time.perf_counter() - began
        for note in llm.engine.spec.notes:
            log(note)
        with run.meter:
            outputs = llm.generate(prompts, params, named) if as_json else _stream(llm, prompts, params, named)
        stats, rates = llm.stats(), achieved(llm.engine, hardware=run.planned.hardware)
        measured = _measured(llm, rates, outputs, startup_s)
        why = UNMEASURED if best_of is None else UNMEASURED | UNMEASURED_BEAMS
        if best_of is not None:
            measured = {name: value for name, value in measured.items() if name not in UNMEASURED_BEAMS}
        measured = run.spent(measured) | measured
        run.measure(measured, why=why)
    document: dict[str, Any] = {
        "model": str(directory),
        "dtype": llm.engine.dtype,
        "outputs": [
            {
                "prompt": output.prompt,
                "index": answer.index,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                **({} if answer.cumulative_logprob is None else {"cumulative_logprob": answer.cumulative_logprob}),
                "prompt_tokens": output.metrics.prompt_tokens,
                "ttft_s": output.metrics.ttft_s,
                "e2e_s": output.metrics.e2e_s,
            }
            for output in outputs
            for answer in output.outputs
        ],
        "run_id": run.run_id,
        "prediction": run.prediction,
        "measurement": measured,
    }
    if stats.exits:
        document["exits"] = stats.exits
    failed = [i for i, output in enumerate(outputs) if any(a.finish_reason == "error" for a in output.outputs)]
    if failed:
        document["error"] = error = f"the model's output for prompt {failed[0] + 1} was not finite. The weights may be damaged."
    if as_json:
        emit(document, "", as_json=True)
    held = weights_text(llm.engine.dtype, llm.engine.runner)
    log(_speed(stats, measured, rates, held, llm.engine.weights_bytes))
    if failed:
        log(error)
        raise typer.Exit(TwostrokeError.exit_code)  # the answers are above, in the one document


def _stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("there is no prompt. Give --prompt TEXT, or pipe the text in.")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise InputError("the text on stdin is not UTF-8. Convert it.") from None
    if not text:
        raise InputError("the prompt from stdin is empty.")
    return text


def _stream(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, lora: str | Sequence[str | None] | None
) -> list[RequestOutput]:
    """Print each answer as it is made; later ones wait until those before are complete. Returns all of them."""
    n_answers = len(prompts) * params.n

    def begin(place: int) -> None:
        index, answer = divmod(place, params.n)
        if n_answers > 1:
            title = f"{index + 1}.{answer + 1}" if params.n > 1 else f"{index + 1}"
            print(f"{'' if place == 0 else chr(10)}[{title}] {prompts[index]}", end="", flush=True)

    turn, waiting, done = 0, [""] * n_answers, [False] * n_answers
    begin(0)
    outputs: list[RequestOutput] = []
    for delta in llm.stream(prompts, params, into=outputs, lora=lora):
        place = delta.index * params.n + delta.answer
        waiting[place] += delta.text
        done[place] = delta.finish_reason is not None
        print(waiting[turn], end="", flush=True)
        waiting[turn] = ""
        while turn + 1 < n_answers and done[turn]:
            turn += 1
            begin(turn)
            print(waiting[turn], end="", flush=True)
            waiting[turn] = ""
    print(flush=True)
    return outputs


def _measured(llm: LLM, rates: Achieved, outputs: Sequence[RequestOutput], startup_s: float) -> dict[str, float]:
    """Measurements by the planner's names. ``tpot_s`` is the mean decode step ÷ the tokens that it gave a request; ``ttft_s``
    and ``e2e_s`` are medians over the prompts; rates of a phase count its own steps only. ``e2e_s`` is left out if an answer
    ended before ``max_tokens``, which is less work than was predicted."""
    import resource
    import statistics

    from twostroke.planner.truth.drafts import draft_values

    stats = llm.stats()
    output_tokens = sum(output.metrics.output_tokens for output in outputs)
    values: dict[str, float] = {
        "warm_startup_s" if llm.engine.loaded_packed else "startup_s": startup_s,
        "ttft_s": statistics.median(output.metrics.ttft_s for output in outputs),
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": output_tokens,
        "weights_bytes": llm.engine.weights_bytes,
        "kv_cache_bytes": llm.engine.kv_cache_bytes,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "output_tok_per_s": output_tokens / max(output.metrics.e2e_s for output in outputs),
    }
    if all(answer.finish_reason == "length" for output in outputs for answer in output.outputs):
        values["e2e_s"] = statistics.median(output.metrics.e2e_s for output in outputs)
    if stats.prefill_s > 0:
        values["prefill_tok_per_s"] = stats.prefill_tokens / stats.prefill_s
    if stats.decode_s > 0:
        values["tpot_s"] = stats.decode_s / stats.decode_steps * stats.decode_requests / stats.decode_tokens
        values["decode_tok_per_s"] = stats.decode_tokens / stats.decode_s
    drafted = stats.draft_tokens, stats.accepted_draft_tokens
    values |= draft_values(stats.decode_requests, stats.decode_tokens, *drafted)
    return values | rates.values()


def _speed(stats: EngineStats, measured: Mapping[str, float], rates: Achieved, dtype: str, weights_bytes: int) -> str:
    """A few lines: start, then each phase with its tokens/s and how near it came to the machine's limits."""
    from twostroke.cli.rates import phase_text, without_limits

    startup_s = measured.get("startup_s") or measured["warm_startup_s"]
    lines = [f"start    {format_seconds(startup_s)}, weights {format_bytes(weights_bytes)} {dtype}"]
    lines += [phase_text(name, phase, rates.product) for name, phase in (("prefill", rates.prefill), ("decode", rates.decode))]
    if stats.mixed_steps:
        lines.append(f"mixed    {stats.mixed_tokens} tokens in steps of both kinds, {format_seconds(stats.mixed_s)}")
    if stats.draft_tokens:
        share = stats.accepted_draft_tokens / stats.draft_tokens
        lines.append(f"drafts   {stats.draft_tokens} tokens checked, {stats.accepted_draft_tokens} right ({share:.0%})")
    if stats.exit_rows:
        left = ", ".join(f"{n / stats.exit_rows:.0%} after {layers}" for layers, n in stats.exits.items())
        lines.append(
            f"exits    {stats.exit_rows} tokens: {left} layers; {stats.exit_row_layers / stats.exit_rows:.1f} on average"
        )
    return "\n".join([*filter(None, lines), *without_limits(rates)])


def _planned(
    directory: Path,
    prompts: Sequence[str],
    params: SamplingParams,
    engine: EngineSettings,
    adapters: Mapping[str, Path],
) -> Planned:
    """The plan of all prompts at once, each of the mean length and computed once for all its answers."""
    from twostroke.core.families import read_spec
    from twostroke.data.tokenizer import load_tokenizer
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.serving.adapters import adapters_in
    from twostroke.planner.serving.first_answer import as_first_answers
    from twostroke.planner.serving.plan import plan_serving
    from twostroke.planner.serving.under_load import Server
    from twostroke.planner.serving.workload import Workload
    from twostroke.planner.truth.drafts import drafts_seen
    from twostroke.planner.truth.recording import Planned
    from twostroke.quantization.held import serving_shape

    hardware = load_hardware("this", "serve")
    spec, tokenizer = read_spec(directory), load_tokenizer(directory)
    longest = min(engine.max_model_len or spec.max_positions, spec.max_positions)
    n_prompt = max(1, round(sum(len(tokenizer.encode(text).ids) for text in prompts) / len(prompts)))
    shape = serving_shape(
        directory,
        spec,
        engine,
        batch=len(prompts) * params.beam_width,
        answers=params.beam_width,
        prompt_tokens=n_prompt,
        output_tokens=max(1, min(params.max_tokens, longest - n_prompt)),
        sampling=params.kinds,
        speculation=drafts_seen(directory, engine.speculate),
        adapters=adapters_in(adapters.values()),
    )
    plan = plan_serving(spec, shape, hardware)
    at_once = Workload.open(math.inf, shape.prompts, shape.prompt_tokens, shape.output_tokens, answers=shape.answers)
    found = Server(plan).serve(at_once)
    together = {"ttft_s": found.ttft_s.median, "e2e_s": found.e2e_s.median, "output_tok_per_s": found.output_tok_per_s}
    tokens = shape.prompts * shape.prompt_tokens
    values = as_first_answers({**plan.prediction(), **together}, tokens, shape.output_tokens, hardware)
    return Planned(values, hardware, {"shape": vars(shape)})
