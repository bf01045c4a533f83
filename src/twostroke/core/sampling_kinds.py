"""What a request may ask of choosing its tokens beyond the largest logit: names that calibration measures and plans price."""

from __future__ import annotations

DRAWN, FILTERED, PENALTIES, LOGPROBS = "drawn", "filtered", "penalties", "logprobs"
SAMPLING_KINDS = (DRAWN, FILTERED, PENALTIES, LOGPROBS)
"""A draw from all tokens, one from those that top-p, top-k or min-p keep, penalties on tokens that came, log-probabilities."""
