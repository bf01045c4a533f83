from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from real_model import make_model
from twostroke.core.errors import DataError
from twostroke.core.recipe import DataRecipe
from twostroke.data.conversations import BEGINS, LEARNED
from twostroke.data.prepare import prepare
from twostroke.evaluation.conversations import answer_nats, score_answers
from twostroke.evaluation.engines import open_scorer
from twostroke.model.load import load_model


@pytest.mark.parametrize("context", [512, 48])
def test_the_score_is_the_mean_over_answers_one_conversation_at_a_time(tmp_path: Path, context: int) -> None:
    model = make_model(tmp_path / "model")
    records = [{"prompt": f"def {i}?", "response": "return " + "self " * (i % 7) + str(i)} for i in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    recipe = DataRecipe((str(tmp_path / "a.json"),), (), 0.5, tokenizer=str(model), layout="prompt")
    prepared = prepare(recipe, tmp_path / "cache")
    decoder = load_model(model)
    tokens, marks = (np.asarray(s[0 : len(s)]) for s in (prepared.heldout_tokens(), prepared.heldout_marks()))
    nats, begins = [], np.flatnonzero(marks & BEGINS)
    for begin, end in zip(begins, [*begins[1:], len(marks)], strict=True):
        ids = torch.from_numpy(tokens[begin:end].astype(np.int64))[:context]
        with torch.no_grad():
            logarithms = torch.log_softmax(decoder(ids[None])[0], dim=-1)
        nats += [-float(logarithms[i - 1, ids[i]]) for i in range(1, len(ids)) if marks[begin + i] & LEARNED]
    score = score_answers(decoder, prepared, context)
    assert score.n_tokens == len(nats) > 20
    assert score.nats_per_token == pytest.approx(sum(nats) / len(nats), rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(score.nats_per_token))
    assert (score.n_cut > 0) == (context == 48 and max(np.diff([*begins, len(marks)])) > 48)
    for engine in ("decoder", "inference"):
        found = answer_nats(open_scorer(model, engine, "fp32"), prepared, context)
        assert len(found.nats) == len(found.n_tokens) == score.n_conversations
        own = found.score()
        assert own.nats_per_token == pytest.approx(score.nats_per_token, rel=1e-4)
        assert (own.n_tokens, own.n_cut) == (score.n_tokens, score.n_cut)
    other = make_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(DataError, match="was prepared with another tokenizer than the model's"):
        answer_nats(open_scorer(other), prepared, context)
    with pytest.raises(DataError, match="has an answer within a context of 2 tokens"):
        answer_nats(open_scorer(model), prepared, 2)
