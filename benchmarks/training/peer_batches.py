"""Batches and optimizer as a peer's own loop would have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

IGNORED = -100
CLIP_NORM = 1.0


class PeerBatches:
    """Fixed rows as they are; documents of varying length padded to the longest of their batch, with a mask of what is text."""

    def __init__(self, path: str) -> None:
        arrays = np.load(path)
        if "padded" in arrays:
            self._rows = [_cut(t, n) for t, n in zip(arrays["padded"], arrays["lengths"], strict=True)]
            self._tokens = [int(n.sum()) for n in arrays["lengths"]]
        else:
            self._rows = [(torch.from_numpy(t.copy()), None) for t in arrays["tokens"]]
            self._tokens = [t.size for t in arrays["tokens"]]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Token ids (B, T), mask (B, T) or None, labels (B, T): the ids, ignored where padded."""
        ids, mask = self._rows[index]
        return ids, mask, ids if mask is None else ids.masked_fill(mask == 0, IGNORED)

    def n_tokens(self, index: int) -> int:
        return self._tokens[index]


def _cut(tokens: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    longest = int(lengths.max())
    mask = (np.arange(longest)[None] < lengths[:, None]).astype(np.int64)
    return torch.from_numpy(tokens[:, :longest].copy()), torch.from_numpy(mask)


def adamw(named: Iterable[tuple[str, nn.Parameter]], learning_rate: float) -> torch.optim.AdamW:
    """Fused AdamW with this package's default numbers: matrices decay, norms and embeddings do not."""
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named:
        if parameter.requires_grad:
            decays[parameter.dim() == 2 and "embed_tokens" not in name and "wte" not in name].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": 0.1 if key else 0.0} for key, parameters in decays.items() if parameters
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def update(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad()
