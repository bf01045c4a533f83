"""Twostroke plans, trains and serves language models: one model definition, two engines.

Importing this package imports neither torch nor any engine; ``twostroke.LLM`` and ``twostroke.SamplingParams``
are loaded when first touched, so that ``twostroke plan`` answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.core.version import __version__

if TYPE_CHECKING:
    from twostroke.engine.llm import LLM
    from twostroke.scheduling.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from twostroke.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from twostroke.scheduling.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
