"""Prefill and decode on machines of their own: what moves between them, and how many of each a rate needs
(Zhong et al., DistServe, arXiv 2401.09670; Patel et al., Splitwise, arXiv 2311.18677)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from twostroke.core.errors import ConfigError
from twostroke.planner.queueing import several_servers_wait_s

MOST_UTILISED = 0.8
"""Share of time that a pool may be busy where nothing else bounds it: beyond it waiting grows faster than load."""


def transfer_s(prompt_tokens: float, kv_bytes_per_token: float, alpha_s: float, bytes_per_s: float) -> float:
    """Seconds to send one prompt's cache: α + prompt tokens · KV bytes ÷ β. Nothing overlaps with the prefill; engines that
    send layer by layer hide most of it behind the prefill itself."""
    if bytes_per_s <= 0:
        raise ConfigError(f"a link of {bytes_per_s} bytes/s sends nothing. Use hardware whose network is known.")
    return alpha_s + prompt_tokens * kv_bytes_per_token / bytes_per_s


@dataclass(frozen=True)
class Disaggregation:
    """Two pools for ``rate_per_s`` requests a second. ``prefill_instances`` and ``decode_instances`` count groups of
    tensor · pipeline devices."""

    rate_per_s: Annotated[float, "requests a second"]
    prefill_instances: Annotated[int, "copies that compute prompts"]
    decode_instances: Annotated[int, "copies that decode"]
    transfer_bytes: Annotated[float, "bytes", "of KV that a request moves"]
    transfer_s: Annotated[float, "s", "that takes"]
    wait_s: Annotated[float, "s", "before a prompt is begun"]
    ttft_s: Annotated[float, "s", "to the first token"]
    tpot_s: Annotated[float, "s", "between tokens, transfer included"]
    prefill_utilisation: Annotated[float, "share of the time"]
    decode_utilisation: Annotated[float, "share of the time"]


def disaggregate(
    rate_per_s: float,
    prefill_s: float,
    decode_step_s: float,
    batch: int,
    output_tokens: int,
    transfer_bytes: float,
    sending_s: float,
) -> Disaggregation:
    """Pools that carry ``rate_per_s``: prefill instances until they are busy at most ``MOST_UTILISED``, decode instances by
    Little's law, rate · (output − 1) · step ÷ batch requests in flight, likewise.

    The first token comes from the prefill pool (wait + prefill); the second waits for the cache, so TPOT carries the transfer
    once: step + transfer ÷ (output − 1). Decode steps have no prefill beside them: that is what the split is for.
    """
    if not 0 < rate_per_s < math.inf:
        raise ConfigError(f"rate={rate_per_s} requests/s must be above 0 to size two pools. Give --rate.")
    later = max(1, output_tokens - 1)
    prefills = max(1, math.ceil(rate_per_s * prefill_s / MOST_UTILISED))
    in_flight = rate_per_s * later * decode_step_s
    decodes = max(1, math.ceil(in_flight / (batch * MOST_UTILISED)))
    wait = several_servers_wait_s(rate_per_s, prefill_s, prefills)
    return Disaggregation(
        rate_per_s=rate_per_s,
        prefill_instances=prefills,
        decode_instances=decodes,
        transfer_bytes=transfer_bytes,
        transfer_s=sending_s,
        wait_s=wait,
        ttft_s=wait + prefill_s,
        tpot_s=decode_step_s + sending_s / later,
        prefill_utilisation=rate_per_s * prefill_s / prefills,
        decode_utilisation=in_flight / (batch * decodes),
    )
