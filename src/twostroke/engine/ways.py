"""In which of the ways that change how a step is computed an engine runs: runner, drafts, early exit. Each goes with some
settings only."""

from __future__ import annotations

from pathlib import Path

from twostroke.core.engine_settings import AT, OFF, EngineSettings
from twostroke.core.errors import ConfigError
from twostroke.core.fitted_exits import check_exits, default_exits, read_fitted_exits
from twostroke.engine.loading import Loaded
from twostroke.engine.tiers.identity import weights_digest
from twostroke.kernels.native_library import library, why_absent


def runs_natively(settings: EngineSettings) -> bool:
    """Raises ConfigError if steps must be deterministic and would be torch's."""
    native = settings.runner == "native" or (settings.runner == "auto" and library() is not None)
    if settings.deterministic and not native:
        remedy = why_absent() or "Use runner='native' or 'auto'."
        raise ConfigError(
            "deterministic needs the native library: the last bits of torch's products depend on the number of rows, so on "
            f"what else is in the batch. {remedy}"
        )
    return native


def checks_drafts(settings: EngineSettings, native: bool) -> bool:
    """Whether steps check drafts. Raises ConfigError where that would change what is answered."""
    if settings.speculate in (OFF, "auto"):
        return native and settings.speculate == "auto"
    if not native:
        raise ConfigError(
            f"speculate={settings.speculate!r} needs runner='native': the last bits of torch's products depend on the number "
            "of rows, so drafts would change answers. Use speculate='off', or 'auto', which drafts where it may."
        )
    return True


def exits_of(directory: Path, loaded: Loaded, settings: EngineSettings, native: bool) -> tuple[tuple[int, ...], float] | None:
    """(layers after which rows may leave, threshold); None if none may. Raises ConfigError for settings that it does not go
    with and where nothing was fitted to the model as it is held."""
    value = settings.early_exit
    if value == OFF:
        return None
    for name, other, why in (
        (f"speculate={settings.speculate!r}", settings.speculate != OFF, "the whole model checks drafts, and exits pass it by"),
        ("deterministic", settings.deterministic, "keys and values depend on where earlier tokens left"),
        (f"runner={settings.runner!r}", not native, why_absent() or "it needs runner='native'"),
    ):
        if other:
            raise ConfigError(f"early_exit={value!r} does not go with {name}: {why.rstrip('.')}.")
    spec = loaded.spec
    if value.startswith(AT):
        layers, threshold = default_exits(spec.n_layers), float(value.removeprefix(AT))
    else:
        fitted = read_fitted_exits(directory)
        layers, threshold = fitted.layers, fitted.threshold
        held, now = (fitted.dtype, fitted.weights), (loaded.weights, weights_digest(loaded.directory))
        if held != now:
            what = f"held as {held[0]}, not {now[0]}" if held[0] != now[0] else "of other weights"
            raise ConfigError(
                f"the exits in {directory} were fitted to a model {what}. Run `twostroke exits {directory} --data TEXT` again."
            )
    check_exits(layers, spec.n_layers)
    return layers, threshold
