"""Where the shared assets are: beside the repository, or where TWOSTROKE_ASSETS says."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = Path(os.environ.get("TWOSTROKE_ASSETS", REPOSITORY.parent / "shared" / "assets"))
