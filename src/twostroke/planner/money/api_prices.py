"""What vendors ask for tokens of their models (``api_prices.toml``): beside one's own cost, the price of not serving at all."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from twostroke.core.errors import ConfigError
from twostroke.planner.money.cost import TokenPrices

API_PRICES_FILE = Path(__file__).parent / "api_prices.toml"

FILLERS = frozenset(("open", "latest", "preview"))
"""Words of a vendor's model name that a checkpoint of the same model lacks."""


@dataclass(frozen=True)
class ApiPrice:
    """$ per million tokens of one vendor's model. ``cached_usd_per_mtok``: input read before; None where not known."""

    model: Annotated[str, "as --api takes it"]
    vendor: Annotated[str, "who sells it"]
    input_usd_per_mtok: Annotated[float, "$ per million tokens of prompts"]
    output_usd_per_mtok: Annotated[float, "$ per million tokens of answers"]
    cached_usd_per_mtok: Annotated[float | None, "$ per million prompt tokens that were read before; null: not known"]
    source: Annotated[str, "who says so"]
    date: Annotated[str, "when"]

    def request_usd(self, prompt_tokens: float, output_tokens: float, cached_share: float = 0.0) -> float:
        """$ of one request of which ``cached_share`` of the prompt was read before (at full price without a cached one)."""
        cached = self.cached_usd_per_mtok if self.cached_usd_per_mtok is not None else self.input_usd_per_mtok
        fresh = TokenPrices(self.input_usd_per_mtok, self.output_usd_per_mtok)
        return (
            fresh.request_usd(prompt_tokens * (1 - cached_share), output_tokens) + prompt_tokens * cached_share * cached / 1e6
        )


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return tomllib.loads(API_PRICES_FILE.read_text(encoding="utf-8"))


def api_models() -> list[str]:
    return sorted(_table()["models"])


def api_price(model: str) -> ApiPrice:
    """The price of ``model``. Raises ConfigError with near matches for a name that is not in the table."""
    table = _table()
    row = table["models"].get(model.strip().lower())
    if row is None:
        near = difflib.get_close_matches(model.lower(), table["models"], n=5)
        hint = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {', '.join(api_models())}."
        raise ConfigError(f"API model {model!r} is not known. {hint}")
    return ApiPrice(
        model.strip().lower(), row["vendor"], row["input"], row["output"], row.get("cached"), table["source"],
        row.get("since", table["date"]),
    )  # fmt: skip


def nearest_api(name: str) -> ApiPrice | None:
    """The vendor's model whose name occurs, word by word, in ``name`` (a directory's, a config's); None where none does.

    Names say little about ability: this finds Mistral-7B's own vendor, not a rival of the same strength.
    """
    words = set(re.split(r"[^a-z0-9.]+", name.lower()))
    named = {model: set(model.split("-")) - FILLERS for model in api_models()}
    fitting = [model for model, parts in named.items() if len(parts) > 1 and parts <= words]
    return api_price(max(fitting, key=lambda model: len(named[model]))) if fitting else None
