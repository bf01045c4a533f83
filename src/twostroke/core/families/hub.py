"""Models by their names on the Hugging Face Hub, without network: a cached ``config.json``, or a row of ``published.toml``."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.core.documents import read_object
from twostroke.core.errors import InputError
from twostroke.core.families.files import read_config, read_spec
from twostroke.core.families.quantised import published_cache, published_scheme
from twostroke.core.families.reader import Reader
from twostroke.core.families.registry import spec_from_config
from twostroke.core.spec import ModelSpec

PUBLISHED_FILE = Path(__file__).parent / "published.toml"


class Named(NamedTuple):
    """What a name stands for. ``scheme`` is how the published weights are held, None for plain ones; ``directory`` is None
    for a row of ``published.toml``; ``cache`` is the type of KV cache that comes with scales, None for the engine's own."""

    name: str
    spec: ModelSpec
    scheme: str | None
    directory: Path | None
    cache: str | None = None


@lru_cache(maxsize=1)
def published_rows() -> dict[str, dict[str, Any]]:
    """Every name of ``published.toml`` → its row, with "config" as a config.json would hold it."""
    found: dict[str, dict[str, Any]] = {}
    for row in tomllib.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))["model"]:
        base = found[row["like"]]["config"] if "like" in row else {}
        complete = {**row, "config": {**base, **row["config"], **dict.fromkeys(row.get("null", ()))}}
        found |= dict.fromkeys(row["names"], complete)
    return found


def known_name(text: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``text`` means: written in any case, with or without its owner. None if no name or more than
    one fits."""
    wanted = text.casefold()
    exact = [name for name in names if name.casefold() == wanted]
    fitting = exact or [name for name in names if name.casefold().rpartition("/")[2] == wanted]
    return fitting[0] if len(fitting) == 1 else None


def hub_cache() -> Path:
    """Where huggingface_hub keeps downloads: HF_HUB_CACHE, else ``hub`` in HF_HOME, else in ~/.cache/huggingface."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"


def cached_directory(name: str) -> Path | None:
    """The snapshot of ``name`` that was downloaded: the one that ``refs/main`` names, else the latest with a config.json."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    snapshots = [file.parent for file in folder.glob("snapshots/*/config.json")]
    main = folder / "refs" / "main"
    if main.is_file():
        snapshots = [s for s in snapshots if s.name == main.read_text(encoding="utf-8").strip()] or snapshots
    return max(snapshots, key=lambda s: s.stat().st_mtime, default=None)


def cached_names() -> list[str]:
    """Names of every model of which the cache holds a config.json."""
    files = hub_cache().glob("models--*/snapshots/*/config.json")
    return sorted({file.parents[2].name.removeprefix("models--").replace("--", "/", 1) for file in files})


def named_model(text: str) -> Named:
    """The model of a path, or of a name on the Hub whose config is cached or published here.

    A path that exists comes first, then the cache, because it holds the model's own file. Raises InputError with near names
    and how to get a config, and what ``read_spec`` raises.
    """
    if Path(text).exists():
        return _of_directory(text, Path(text))
    cached = known_name(text, cached_names())
    if cached is not None and (directory := cached_directory(cached)) is not None:
        return _of_directory(cached, directory)
    published = known_name(text, published_rows())
    if published is None:
        raise InputError(_unknown(text))
    config = published_rows()[published]["config"]
    return Named(published, spec_from_config(config), published_scheme(config), None, published_cache(config))


def _of_directory(name: str, directory: Path) -> Named:
    """Of a model directory or a config.json. NVIDIA's checkpoints may say in a file of their own how they are quantised."""
    config, beside, spec = read_config(directory), directory / "hf_quant_config.json", read_spec(directory)
    if not config.get("quantization_config") and beside.is_file():
        config["quantization_config"] = {"quant_method": "modelopt", **Reader(read_object(beside)).object("quantization")}
        spec = spec.with_(checkpoint_scheme=published_scheme(config))
    return Named(name, spec, published_scheme(config), directory, published_cache(config))


def _unknown(text: str) -> str:
    """The sentence for what is neither a file nor the name of a cached or published model."""
    kinds = "a recipe (.toml), a model directory or a config.json"
    if text.startswith((".", "/", "~")) or text.endswith(".json") or text.count("/") > 1:
        return f"{text} does not exist. Give {kinds}, or a model's name on the Hub."
    names = {name.casefold(): name for name in (*published_rows(), *cached_names())}
    tails = {name.rpartition("/")[2]: full for name, full in names.items()}
    wanted = text.casefold()
    near = [names[n] for n in difflib.get_close_matches(wanted, names, n=3, cutoff=0.7)]
    near += [tails[n] for n in difflib.get_close_matches(wanted.rpartition("/")[2], tails, n=3, cutoff=0.7)]
    guess = f" Did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    name = text if "/" in text else "OWNER/NAME"
    return (
        f"{text} does not exist, and no config.json of a model of that name is known here.{guess} "
        f"`hf download {name} config.json` puts one in the cache; or give {kinds}."
    )
