"""Text that a model writes: so many rows, each begun by its first token, what its own probabilities say, the same each time."""

from __future__ import annotations

from pathlib import Path

import torch

from small_models import saved
from twostroke.engine.own_text import own_text


def test_rows_are_whole_the_same_each_time_and_unlike_one_another(tmp_path: Path) -> None:
    decoder, directory = saved("llama", tmp_path / "m", max_positions=40)
    rows = own_text(directory, 70, 40)
    assert rows.shape == (70, 40)
    assert bool((rows[:, 0] == decoder.spec.bos_token_id).all())
    assert 0 <= int(rows.min()) <= int(rows.max()) < decoder.spec.vocab_size
    assert len({tuple(row.tolist()) for row in rows}) == 70
    assert torch.equal(rows, own_text(directory, 70, 40))


def test_tokens_come_as_often_as_the_model_expects_them(tmp_path: Path) -> None:
    decoder, directory = saved("llama", tmp_path / "m", max_positions=40)
    rows = own_text(directory, 60, 40)
    with torch.inference_mode():
        exact = decoder(rows[:, :-1]).log_softmax(-1)
    nats = -exact.gather(2, rows[:, 1:, None]).squeeze(2)
    entropy = -(exact.exp() * exact).sum(-1)
    # Mean surprise of what was drawn is the entropy, within four standard errors of 2,340 draws.
    error = float((nats - entropy).std() / nats.numel() ** 0.5)
    assert abs(float((nats - entropy).mean())) < 4 * error + 0.01
