"""Two pools carry their rate, and the cache that moves between them is counted."""

from __future__ import annotations

import pytest

from twostroke.core.errors import ConfigError
from twostroke.planner.serving.under_load import MOST_UTILISED, disaggregate, transfer_s


def test_a_prompts_cache_over_a_link() -> None:
    # Llama-3-70B: 327,680 bytes a token; 8,192 tokens are 2.68 GB: 53.7 ms at 50 GB/s
    assert transfer_s(8192, 327_680, 0.0, 50e9) == pytest.approx(0.05369, rel=1e-3)
    assert transfer_s(8192, 327_680, 1e-3, 50e9) == pytest.approx(0.05469, rel=1e-3)


def test_pools_are_sized_by_work_and_littles_law() -> None:
    # prefill: 10/s · 0.4 s = 4 busy, 5 at 80%; decode: 10/s · 100 · 20 ms = 20 in flight, 8 a batch: 2.5, at 80% 3.125
    found = disaggregate(10.0, 0.4, 0.02, batch=8, output_tokens=101, transfer_bytes=1e9, sending_s=0.02)
    assert (found.prefill_instances, found.decode_instances) == (5, 4)
    assert found.prefill_utilisation == pytest.approx(0.8)
    assert found.decode_utilisation == pytest.approx(20 / 32)
    assert found.tpot_s == pytest.approx(0.02 + 0.02 / 100)
    assert found.ttft_s == pytest.approx(found.wait_s + 0.4)
    assert found.wait_s > 0


@pytest.mark.parametrize("rate", [0.1, 3.0, 77.0])
def test_no_pool_is_busier_than_it_may_be(rate: float) -> None:
    found = disaggregate(rate, 0.3, 0.03, batch=16, output_tokens=200, transfer_bytes=0.0, sending_s=0.0)
    assert max(found.prefill_utilisation, found.decode_utilisation) <= MOST_UTILISED + 1e-9


def test_pools_without_a_rate_and_links_without_bandwidth_are_refused() -> None:
    with pytest.raises(ConfigError, match="--rate"):
        disaggregate(0.0, 0.3, 0.03, 16, 200, 0.0, 0.0)
    with pytest.raises(ConfigError, match="sends nothing"):
        transfer_s(10, 10.0, 0.0, 0.0)
