"""Measures what is done for the first time in a new process, before Python, torch and the system have everything at hand."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from twostroke.calibration.serving_steps import write_tokenizer
from twostroke.calibration.transformer import straight_line
from twostroke.core.rates import FirstUses
from twostroke.engine.llm import LLM
from twostroke.model.decoder import Decoder
from twostroke.model.initialise import initialise
from twostroke.model.save import save_model
from twostroke.planner.hardware.anchors import anchor_spec
from twostroke.quantization.convert import quantize_model
from twostroke.scheduling.sampling_params import SamplingParams

OUTPUT, ANSWERS = 24, 5
WIDTH, VOCABULARY = 128, 4096
FEW_LAYERS, MANY_LAYERS = 1, 5
ROUNDS = 3
TIMEOUT_S = 60.0


def measure_first_uses(rounds: int = ROUNDS) -> FirstUses | None:
    """The first of ``ANSWERS`` answers of a process beyond the later ones, and writing tiny quantised models of two depths:
    medians of ``rounds`` processes each. None if that fails."""
    with tempfile.TemporaryDirectory(prefix="twostroke-first-") as folder:
        few, many = (_model(n_layers, Path(folder)) for n_layers in (FEW_LAYERS, MANY_LAYERS))
        try:
            answers = [_in_a_new_process("answers", few) for _ in range(rounds)]
            few_s, many_s = (median(_in_a_new_process("quantised", model)[0] for _ in range(rounds)) for model in (few, many))
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    prompt_s, tokens_s = (max(0.0, median(one[i] for one in answers)) for i in range(2))
    start_s, layer_s = straight_line(FEW_LAYERS, MANY_LAYERS, few_s, many_s)
    return FirstUses(prompt_s, tokens_s, OUTPUT - 1, start_s, layer_s)


def _model(n_layers: int, folder: Path) -> Path:
    spec, directory = anchor_spec(WIDTH, n_layers, VOCABULARY, 1), folder / f"l{n_layers}"
    decoder = Decoder(spec)
    initialise(decoder, 0)
    save_model(decoder, spec, directory, "bf16")
    write_tokenizer(directory, VOCABULARY)
    return directory


def _in_a_new_process(what: str, directory: Path) -> list[float]:
    command = [sys.executable, "-P", "-m", __name__, what, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return [float(value) for value in done.stdout.split()]


def _answers(directory: Path) -> list[float]:
    """Seconds of the first prompt beyond later ones, and of all steps that follow it beyond those that follow later ones."""
    llm, found = LLM(directory), []
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.8, seed=0)
    for _ in range(ANSWERS):
        before_s = llm.stats().decode_s
        (answer,) = llm.generate("first answer", params)
        found.append((answer.metrics.ttft_s, llm.stats().decode_s - before_s))
    (prompt_s, tokens_s), *later = found
    return [prompt_s - median(one[0] for one in later), tokens_s - median(one[1] for one in later)]


def _quantised(directory: Path) -> list[float]:
    begin = time.perf_counter()
    quantize_model(directory, directory.with_name(f"{directory.name}-quantised"), replace=True)
    return [time.perf_counter() - begin]


MEASURED: dict[str, Callable[[Path], list[float]]] = {"answers": _answers, "quantised": _quantised}

if __name__ == "__main__":
    print(*MEASURED[sys.argv[1]](Path(sys.argv[2])))
