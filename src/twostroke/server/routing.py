"""Predicts for each of several engines when a request's first token would come from it, and chooses the earliest.

    time to first token = (S·s + (W + u + S·d) / r) + b,    S = ceil((W + u) / (B − d))

W: tokens of prompts that the engine has and that have no token yet; u: those of this prompt that its cache does not hold; d:
answers that decode, which take a token of every step; B: tokens of a step; r: prompt tokens a second; s: seconds of a step that
only decodes, if d > 0; b: for how long the present step has taken longer than such a step. r and s are measured: they follow
the counters of all engines together, because one that gets few requests would learn little of itself. What a cache holds is
known from the keys of its pages, which each engine sends as they change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twostroke.scheduling.prefix_tree import ROOT, chain_key, root_beside, root_of, root_of_weights

FIRST_TOK_PER_S, FIRST_STEP_S = 1000.0, 0.02
"""Of engines that have computed nothing yet. Engines of one kind are compared, so their order hardly depends on it."""
LEAST_LOOK_S = 0.02
"""Less computing time between two looks at the counters says nothing of a rate."""


@dataclass
class Pace:
    """How fast the engines are, from the differences of their counters (``EngineStats``). New measurements count half."""

    prompt_tok_per_s: float = FIRST_TOK_PER_S
    step_s: float = FIRST_STEP_S
    _seen: dict[str, float] = field(default_factory=dict)
    _learned: set[str] = field(default_factory=set)

    def look(self, stats: Mapping[str, float]) -> None:
        new = {name: stats.get(name, 0.0) for name in ("prefill_s", "prefill_tokens", "decode_s", "decode_steps")}
        if any(value < self._seen.get(name, 0.0) for name, value in new.items()):
            self._seen = {}  # an engine was replaced
        seconds = new["prefill_s"] - self._seen.get("prefill_s", 0.0)
        tokens = new["prefill_tokens"] - self._seen.get("prefill_tokens", 0.0)
        if seconds >= LEAST_LOOK_S and tokens > 0:
            self.prompt_tok_per_s = self._mixed("prompt", self.prompt_tok_per_s, tokens / seconds)
            self._seen |= {name: new[name] for name in ("prefill_s", "prefill_tokens")}
        seconds = new["decode_s"] - self._seen.get("decode_s", 0.0)
        steps = new["decode_steps"] - self._seen.get("decode_steps", 0.0)
        if seconds >= LEAST_LOOK_S and steps > 0:
            self.step_s = self._mixed("step", self.step_s, seconds / steps)
            self._seen |= {name: new[name] for name in ("decode_s", "decode_steps")}

    def _mixed(self, name: str, old: float, new: float) -> float:
        known = name in self._learned
        self._learned.add(name)
        return (old + new) / 2 if known else new


def first_token_s(pace: Pace, waiting: int, uncached: int, decoding: int, budget: int, busy_s: float = 0.0) -> float:
    """Predicted seconds to the first token, as above. ``waiting`` W, ``uncached`` u, ``decoding`` d, ``budget`` B, tokens and
    answers; ``busy_s`` is how long the present step has taken so far."""
    tokens = waiting + uncached
    steps = -(-tokens // max(1, budget - decoding)) if tokens else 1
    seconds = (tokens + steps * decoding) / pace.prompt_tok_per_s + max(0.0, busy_s - pace.step_s)
    return seconds + (steps * pace.step_s if decoding else 0.0)


class Known:
    """The keys of the pages that one engine's cache holds, and of its adapters."""

    def __init__(self) -> None:
        self.adapters: dict[str, bytes] = {}
        self.weights = b""  # the name of its weights in the keys
        self._pages: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._pages)

    def change(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._pages.update(stored)
        self._pages.difference_update(removed)

    def forget(self) -> None:
        """Another engine has taken its place."""
        self._pages.clear()
        self.adapters.clear()
        self.weights = b""

    def cached_tokens(self, prompt_ids: Sequence[int], page_tokens: int, client: str | None, lora: str | None) -> int:
        """Tokens at the beginning of the prompt whose keys and values are there, in whole pages and without the last token,
        which is always computed. ``client``: whose prefixes are looked for, None for everybody's. Hashes one page more than it
        finds."""
        root = root_of_weights(ROOT if client is None else root_of(client), self.weights)
        if lora is not None:
            if lora not in self.adapters:
                return 0
            root = root_beside(root, self.adapters[lora])
        key, n = root, 0
        while self._pages and n + page_tokens < len(prompt_ids):
            key = chain_key(key, prompt_ids[n : n + page_tokens])
            if key not in self._pages:
                break
            n += page_tokens
        return n
