"""Agreement with transformers as numbers: what the tests of logits and greedy tokens measure, and the table of every family.

``python tests/parity.py`` measures every case of ``hf_models.py`` in about a minute and writes ``docs/parity.json``, which
``docs/families.md`` shows.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_models import CASES, TOLERANCE, decoder_error, random_tokens, relative_error, save_reference
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.families import FAMILIES, read_spec
from twostroke.core.profile import read_fingerprint
from twostroke.engine.core import EngineCore
from twostroke.engine.llm import LLM
from twostroke.engine.meters import EngineStats
from twostroke.scheduling.sampling_params import SamplingParams

TABLE = Path(__file__).parents[1] / "docs" / "parity.json"
RUNNERS = ("torch", "native")
MAX_TOKENS = 24
TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
TOKEN_BUDGET = 13  # longer prompts are computed in chunks


@dataclass
class Reference:
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]  # between the two best logits at each token

    def difference(self, found: list[int]) -> str | None:
        """The first token that is another and no tie; None where there is none."""
        for i, (ours, theirs) in enumerate(zip(found, self.tokens, strict=True)):
            if ours != theirs:
                # After a tie what follows has another history.
                tied = self.gaps[i] < TIE
                return None if tied else f"token {i} is {ours}, transformers says {theirs} by {self.gaps[i]}"
        return None

    def assert_same(self, found: list[int]) -> None:
        assert self.difference(found) is None, self.difference(found)


def prompts() -> list[list[int]]:
    """Lengths around page, chunk and window sizes; the third and fourth share their first 17 tokens."""
    rng = random.Random(0)
    shared = [rng.randrange(2, 97) for _ in range(17)]
    return [
        [5],
        [rng.randrange(2, 97) for _ in range(11)],
        [*shared, 3, 4, 5],
        [*shared, 9, 8, 7, 6, 5, 4, 3, 2],
        [rng.randrange(2, 97) for _ in range(40)],
        [rng.randrange(2, 97) for _ in range(16)],
    ]


def references_of(model: Any) -> list[Reference]:
    """What ``generate`` of a transformers model says, greedily, to each of ``prompts``. Without its cache, which keeps every
    key where a window is one token."""
    references = []
    for prompt in prompts():
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=MAX_TOKENS,
                do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
        best = torch.stack(made.logits)[:, 0].topk(2).values
        references.append(Reference(prompt, made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return references


def alone(directory: Path, references: list[Reference]) -> list[list[int]]:
    """The engine's tokens, one request after the other."""
    llm = LLM(directory, dtype="fp32", n_threads=1)
    return [llm.generate([reference.prompt], GREEDY)[0].outputs[0].token_ids for reference in references]


def small_steps(directory: Path, runner: str = "auto") -> EngineCore:
    """An engine whose steps and pages are small beside ``prompts``."""
    settings = EngineSettings("fp32", runner=runner, max_running=4, token_budget=TOKEN_BUDGET, page_tokens=4, n_threads=1)
    return EngineCore(directory, settings)


def mixed(directory: Path, references: list[Reference]) -> tuple[list[list[int]], EngineStats]:
    """The engine's tokens, of every prompt twice, and its counters. Requests arrive two steps apart, so that prompts in chunks
    run beside decodes, over small pages that some share; the second time prefixes are found."""
    core = small_steps(directory)
    found: list[list[int]] = [[] for _ in 2 * references]
    for i, reference in enumerate(references * 2):
        core.add_request(str(i), reference.prompt, GREEDY)
        for _ in range(2):
            for event in core.step():
                found[int(event.request_id)] += event.token_ids
    while core.has_work:
        for event in core.step():
            found[int(event.request_id)] += event.token_ids
    return found, core.stats()


@torch.no_grad()
def engine_error(theirs: Any, directory: Path, runner: str) -> float:
    """Relative error of the logits of ``runner`` at every position of two texts: half of each is a prompt in chunks, the other
    half is decoded token by token, both texts in one batch."""
    core, texts = small_steps(directory, runner), random_tokens()
    n_tokens = texts.shape[1]
    expected = theirs(texts).logits[:, :-1]
    found = torch.full_like(expected, float("nan"))
    for i, text in enumerate(texts.tolist()):
        core.add_request(str(i), text[: n_tokens // 2], SamplingParams(max_tokens=n_tokens - n_tokens // 2, ignore_eos=True))
    while core.has_work:
        step = core.scheduler.schedule()
        logits, first, sampled = core.compute(step, torch.arange(step.n_tokens)), 0, []
        for place, (request, start, count) in enumerate(zip(step.requests, step.starts, step.counts, strict=True)):
            text = int(request.id)
            found[text, start : start + count] = logits[first : first + count]
            first += count
            sampled.append(int(texts[text, start + count]) if step.samples(place) else None)
        core.scheduler.update(step, sampled)
    return relative_error(found, expected)


def measured(case: str) -> dict[str, Any]:
    """Errors of one case and how many of its greedy answers are those of transformers: [equal, all] of each way to serve. The
    engine chooses some angles by the longest context where transformers takes the text's length: those have no engine's."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        theirs = save_reference(case, directory)
        spec = read_spec(directory)
        row: dict[str, Any] = {"family": spec.family, "errors": {"decoder": decoder_error(theirs, directory)}, "tokens": {}}
        if spec.rope.scaling in ("dynamic", "longrope"):
            return row
        row["errors"] |= {runner: engine_error(theirs, directory, runner) for runner in RUNNERS}
        references = references_of(theirs)
        assert len({token for reference in references for token in reference.tokens}) > 10, f"{case} says little"
        found, stats = mixed(directory, references)
        assert stats.prefix_hit_tokens > 0
        assert stats.mixed_steps > 0
        n = len(references)
        chunked = [i for i, reference in enumerate(references) if len(reference.prompt) > TOKEN_BUDGET]
        ways = {
            "alone": list(zip(references, alone(directory, references), strict=True)),
            "mixed": list(zip(references, found[:n], strict=True)),
            "chunked": [(references[i], found[i]) for i in chunked],
            "prefix_hit": list(zip(references, found[n:], strict=True)),
        }
        for way, pairs in ways.items():
            row["tokens"][way] = [sum(reference.difference(tokens) is None for reference, tokens in pairs), len(pairs)]
        return row


def table() -> dict[str, Any]:
    """Of every family its cases: the largest error of each, and answers added up."""
    torch.set_num_threads(1)
    families: dict[str, Any] = {name: {"cases": 0, "errors": {}, "tokens": {}} for name in FAMILIES}
    for case in CASES:
        row = measured(case)
        print(case, json.dumps(row), file=sys.stderr, flush=True)
        family = families[row["family"]]
        family["cases"] += 1
        for name, error in row["errors"].items():
            family["errors"][name] = max(float(f"{error:.1e}"), family["errors"].get(name, 0.0))
        for way, (equal, n) in row["tokens"].items():
            before = family["tokens"].get(way, [0, 0])
            family["tokens"][way] = [before[0] + equal, before[1] + n]
    return {
        "bound": TOLERANCE,
        "tie": TIE,
        "processor": read_fingerprint().cpu_model,
        "versions": {name: version(name).partition("+")[0] for name in ("torch", "transformers")},
        "families": families,
    }


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1) + "\n")
