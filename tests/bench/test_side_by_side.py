from __future__ import annotations

from pathlib import Path

import pytest

from real_model import make_model
from twostroke.bench.side_by_side import measure_alternating
from twostroke.core.errors import ConfigError
from twostroke.engine.llm import LLM


@pytest.mark.alone
def test_both_models_take_rounds_over_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warm-up and three rounds of both, alternating in going first; a model a hundred times as large is the slower one."""
    llms = [LLM(make_model(tmp_path / size, size), dtype="fp32", n_threads=1) for size in ("tiny", "6M")]
    order: list[int] = []
    for i, llm in enumerate(llms):
        generate = llm.generate
        monkeypatch.setattr(llm, "generate", lambda p, q, i=i, g=generate: (order.append(i), g(p, q))[1])
    rounds: list[None] = []
    point = measure_alternating(llms, 2, 20, 6, 3, lambda: rounds.append(None))
    assert order == [1, 0, 0, 1, 1, 0, 0, 1]
    assert len(rounds) == 3
    assert point.decode_ratio < 0.8
    assert point.prefill_ratio < 0.8
    assert point.decode_ratio_range[0] <= point.decode_ratio <= point.decode_ratio_range[1]
    assert point.a.decode_tok_per_s > point.b.decode_tok_per_s > 0
    for llm in llms:
        stats = llm.stats()
        assert stats.prefix_hit_tokens == 0
        assert stats.prompt_tokens == 4 * 2 * 20
    with pytest.raises(ConfigError, match="output_tokens=1 at least 2"):
        measure_alternating(llms, 1, 20, 1, 1)
