"""What importing and exporting a model is expected to take, for both commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core.errors import ConfigError
from twostroke.core.units import format_seconds

if TYPE_CHECKING:
    from twostroke.planner.truth.recording import Planned, Recording

PLAIN = ("fp32", "bf16", "fp16")


def planned_import(source: str, dtype: str) -> Planned:
    """By the bytes of a local source. Raises ConfigError where how many are written, or what decoding takes, is not known."""
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(f"how many bytes {source} has is known only when they were downloaded.")
    if path.is_dir():
        return _of_directory(path, dtype, "import_s")
    size = path.stat().st_size
    if path.suffix == ".bin":
        return _planned("import_s", size, size * (1.0 if dtype == "auto" else _bytes_of(dtype) / 4))
    if dtype != "auto":
        raise ConfigError(f"how long decoding {path.name} to {dtype} takes was not measured.")
    return _planned("import_s", size, size)


def planned_export(model: Path, to: str, precision: str) -> Planned:
    """By the bytes of the model in ``model`` or its folder. Raises ConfigError for a format whose writer does more."""
    directory = next((d for d in (model, model / "model") if (d / "config.json").is_file()), None)
    if directory is None:
        raise ConfigError(f"how long merging the adapters in {model} takes was not measured.")
    name = {"f32": "fp32", "f16": "fp16"}.get(precision.casefold(), precision.casefold())
    if to not in ("hf", "mlx", "gguf") or name not in ("auto", *PLAIN):
        raise ConfigError(f"how long --to {to} --precision {precision} takes was not measured: it does more than to write.")
    return _of_directory(directory, name, "export_s")


def _of_directory(directory: Path, dtype: str, name: str) -> Planned:
    """Of a model directory in Hugging Face layout, written in ``dtype``."""
    from twostroke.core.families import read_config, read_spec
    from twostroke.planner.work.params import count_parameters

    held = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    if dtype == "auto":
        if read_config(directory).get("quantization_config"):
            raise ConfigError(f"how long decoding the quantised weights in {directory} takes was not measured.")
        return _planned(name, held, held)
    return _planned(name, held, _bytes_of(dtype) * count_parameters(read_spec(directory)).total)


def _bytes_of(dtype: str) -> float:
    from twostroke.core.dtypes import bytes_of

    if dtype not in PLAIN:
        raise ConfigError(f"how long writing {dtype} takes was not measured.")
    return bytes_of(dtype)


def _planned(name: str, read_bytes: float, written_bytes: float) -> Planned:
    from twostroke.planner.hardware.tables import load_hardware
    from twostroke.planner.training.moving import moving_s
    from twostroke.planner.truth.recording import Planned

    hardware = load_hardware("this")
    inputs = {"read_bytes": read_bytes, "written_bytes": written_bytes}
    return Planned({name: moving_s(read_bytes, written_bytes, hardware)}, hardware, inputs)


def took(run: Recording, name: str, seconds: float) -> str:
    """``1.2 s (predicted 1.1 s)``, without the rest where nothing was predicted."""
    expected = run.prediction.get(name)
    return format_seconds(seconds) + (f" (predicted {format_seconds(expected)})" if expected is not None else "")
