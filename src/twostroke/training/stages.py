"""Which layers a stage of a pipeline has, and which parameters."""

from __future__ import annotations

from twostroke.core.errors import ConfigError
from twostroke.core.spec import ModelSpec


def check_pipeline(spec: ModelSpec, n: int) -> None:
    """Raise ConfigError if ``n`` stages cannot train ``spec``."""
    if n == 1:
        return
    if spec.n_layers < n:
        raise ConfigError(f"parallel.pipeline={n} must not exceed n_layers={spec.n_layers}. Each stage has a layer at least.")
    if spec.moe is not None:
        raise ConfigError(
            f"the model has a mixture of experts, whose balance parallel.pipeline={n} does not count over stages yet. Use "
            "parallel.data, shard or expert."
        )


def layers_of(stage: int, n_stages: int, n_layers: int) -> range:
    """The layers of ``stage``. What ``n_stages`` do not divide goes to the first ones, because the last has the head."""
    each, more = divmod(n_layers, n_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def stage_of(name: str, n_stages: int, n_layers: int) -> int:
    """The stage that holds parameter ``name``."""
    part, _, rest = name.partition(".")
    if part == "blocks":
        layer = int(rest.split(".", 1)[0])
        return next(stage for stage in range(n_stages) if layer in layers_of(stage, n_stages, n_layers))
    return 0 if part in ("embed", "position_embed") else n_stages - 1
