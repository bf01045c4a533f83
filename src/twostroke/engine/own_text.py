"""Text that a model writes itself, to fit rounding to if there is no other text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twostroke.core.engine_settings import OFF, EngineSettings
from twostroke.core.errors import EngineError
from twostroke.engine.core import EngineCore
from twostroke.scheduling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Int

MAX_RUNNING = 32


def own_text(directory: Path | str, n_rows: int, length: int) -> Int[Tensor, "n_rows length"]:
    """``n_rows`` rows of ``length`` tokens, sampled at temperature 1 behind the model's first token, the same each time.

    A row goes on after an end token, as packed documents do. Codes fitted to such text are nearly as good as codes fitted to
    text like the training data: KL on held-out text 0.0717 against 0.0674 nats (stories260K), and 0.00219 against 0.00213 (3.9M
    parameters, novels). Raises what ``EngineCore`` does, and EngineError if the model's output is not finite.
    """
    engine = EngineCore(directory, EngineSettings(max_running=MAX_RUNNING, max_model_len=length, max_step_ratio=OFF))
    spec = engine.spec
    first = spec.bos_token_id if spec.bos_token_id is not None else next(iter(spec.eos_token_ids), 0)
    rows: dict[str, list[int]] = {str(i): [first] for i in range(n_rows)}
    for i, name in enumerate(rows):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=length - 1, ignore_eos=True)
        engine.add_request(name, [first], params)
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason == "error":
                raise EngineError("the model's output was not finite. The weights may be damaged.")
            rows[event.request_id] += event.token_ids
    return torch.tensor(list(rows.values()))
