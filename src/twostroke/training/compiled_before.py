"""Whether a run's compiled graphs lie in the compiler's cache: a start takes seconds then, and tens of seconds otherwise.

A run leaves a mark in the cache itself after its first step, so the marks go when the cache does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.core.described import plain
from twostroke.core.recipe import TrainRecipe
from twostroke.core.spec import ModelSpec
from twostroke.planner.training.shape import TrainingShape


def mark_of(recipe: TrainRecipe, spec: ModelSpec, environment: Mapping[str, Any]) -> Path:
    """Where the mark of a run of these shapes in ``environment`` (``training.environment``) lies."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()  # torch's own function makes the folder, or fails
    shape = TrainingShape.from_recipe(recipe, steps=0)
    parts = [plain(spec), plain(shape), plain(recipe.parallel), plain(recipe.lora), dict(environment)]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return Path(cache) / "twostroke" / key[:32]


def was_compiled(mark: Path) -> bool:
    """Whether such a run took its first step since the cache was emptied."""
    with contextlib.suppress(OSError):
        return mark.is_file()
    return False


def note_compiled(mark: Path) -> None:
    """Leave the mark. In a cache that cannot be written there is none, and the next start is planned too long."""
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
