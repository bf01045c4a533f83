"""Samples texts from the model while it is training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from twostroke.model.decoder import Decoder
from twostroke.training.diagnostics import evaluating
from twostroke.training.observers import Observer
from twostroke.training.progress import Phase
from twostroke.training.retrying_file import RetryingFile

if TYPE_CHECKING:
    from twostroke.training.measurement import StepRecord
    from twostroke.training.run import RunState

SAMPLES_FILE = "samples.jsonl"
NEW_TOKENS = 64
ROW_MULTIPLE = 64
TEMPERATURE = 0.8
"""Temperature of the second text of a prompt. The first is greedy: it shows the most probable text, and soon repeats itself."""


def _own(chosen: int) -> int:
    return chosen


def continuation(
    decoder: Decoder,
    prompt: Sequence[int],
    n_tokens: int,
    context: int,
    eos_id: int,
    temperature: float = 0.0,
    seed: int = 0,
    agreed: Callable[[int], int] = _own,
) -> list[int]:
    """Up to ``n_tokens`` ids that follow ``prompt``: always the most probable one, or drawn at ``temperature`` with ``seed``.

    Each token costs a forward pass over at most the last ``context`` tokens, without a KV cache and so without a second
    implementation of the model. Rows are padded to a multiple of ``ROW_MULTIPLE``, which causal attention does not see. With a
    new length for each token, the CPU's matrix library would keep code for every length (150 MiB for 64 lengths). Generation
    ends before ``eos_id``. Decoder and random states are restored. Ranks that hold parts of the decoder call this together, and
    ``agreed`` gives the id that they go on with.
    """
    device = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    with evaluating(decoder):
        for _ in range(n_tokens):
            newest = ids[-context:]
            filling = min(-len(newest) % ROW_MULTIPLE, context - len(newest))
            tokens = torch.tensor([newest + [0] * filling], device=device)
            logits = decoder.logits(decoder.hidden(tokens)[0, len(newest) - 1]).float().cpu()
            if temperature > 0:
                chosen = int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
            else:
                chosen = int(logits.argmax())
            chosen = agreed(chosen)
            if chosen == eos_id:
                break
            ids.append(chosen)
    return ids[len(prompt) :]


class Samples(Observer):
    """Writes every ``every`` steps texts that follow ``prompts``, to the console, to the line's "samples" and to
    ``samples.jsonl``.

    A line of the file: step, prompt, the text that is likeliest, and one drawn at ``TEMPERATURE`` whose seed follows from the
    recipe's seed, the step and the prompt. Where the run reads conversations a prompt is a user's message.
    """

    name = "sampling"
    runs_model = True

    def __init__(self, every: int, prompts: Sequence[str], log: Callable[[str], None]) -> None:
        self.every, self.prompts = every, tuple(prompts)
        self._log = log
        self._file: RetryingFile | None = None
        self._encoded: list[list[int]] = []

    def begin(self, run: RunState) -> None:
        from twostroke.data.tokenizer import load_tokenizer

        self._tokenizer = load_tokenizer(run.inputs.prepared.tokenizer_path)
        self._encoded = [self._encode(run, prompt) for prompt in self.prompts]
        if run.inputs.ranks.is_first:
            self._file = RetryingFile(run.inputs.directory.path / SAMPLES_FILE, self._log)
            self._file.keep_lines(lambda line: int(line["step"]) <= run.step)

    def _encode(self, run: RunState, prompt: str) -> list[int]:
        if not run.inputs.prepared.holds_conversations:
            ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
            return ids
        from twostroke.data.chat import render_chat
        from twostroke.data.conversations import conversation_template

        template = conversation_template(run.inputs.recipe.data, self._tokenizer, run.inputs.prepared.eos_id)
        text = render_chat(template.source, [{"role": "user", "content": prompt}], True, **template.variables)
        rendered: list[int] = self._tokenizer.encode(text, add_special_tokens=template.source is None).ids
        return rendered

    def after_step(self, run: RunState, record: StepRecord) -> dict[str, Any]:
        if record.step % self.every:
            return {}
        with run.inputs.ranks.progress.doing(Phase.OBSERVING):
            samples = [self._sample(run, record.step, number) for number in range(len(self.prompts))]
            run.masters.drop_gathered()
        if self._file is not None:
            for sample in samples:
                self._log(f"step {record.step}  {_one_line(sample['prompt'])} → {_one_line(sample['greedy'])}")
            self._file.append("".join(json.dumps(sample) + "\n" for sample in samples).encode())
        return {}

    def _sample(self, run: RunState, step: int, number: int) -> dict[str, Any]:
        """The line of the prompt with this ``number``."""
        inputs, ids = run.inputs, self._encoded[number]
        agreed = inputs.ranks.of_last_layer if run.masters.is_sharded else _own
        context = min(inputs.spec.max_positions, inputs.recipe.train.sequence_length)
        seed = (inputs.recipe.seed * 1_000_003 + step) * 1_009 + number
        greedy, sampled = (
            self._tokenizer.decode(
                continuation(run.decoder, ids, NEW_TOKENS, context, inputs.prepared.eos_id, temperature, seed, agreed)
            )
            for temperature in (0.0, TEMPERATURE)
        )
        return {"step": step, "prompt": self.prompts[number], "greedy": greedy, "sampled": sampled}

    def close(self) -> None:
        self._file = None


def _one_line(text: str, width: int = 100) -> str:
    flat = " ".join("⏎".join(text.splitlines()).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
