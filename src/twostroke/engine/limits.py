"""What the settings, the model and free memory make of the scheduler's limits."""

from __future__ import annotations

from twostroke.core import policy
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, ConfigError
from twostroke.core.spec import ModelSpec
from twostroke.core.units import format_bytes
from twostroke.engine.kv_pool import token_bytes
from twostroke.engine.memory import available_bytes
from twostroke.scheduling.step import SchedulerConfig, scored_rows


def scheduler_limits(spec: ModelSpec, settings: EngineSettings, kv_dtype: str, draft_rows: int) -> SchedulerConfig:
    """The scheduler's limits, with the pages and the context that memory allows. Raises ConfigError for a setting that is
    impossible for this model, and CapacityError if what the settings ask for does not fit."""
    max_model_len = settings.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ConfigError(f"max_model_len={max_model_len} is beyond the model's max_positions={spec.max_positions}. Lower it.")
    token = token_bytes(spec, kv_dtype)
    page_bytes = token * settings.page_tokens
    free = available_bytes()
    if settings.kv_cache_bytes is None:
        share = policy.CACHE_SHARE * free / settings.replicas
        n_pages = policy.default_pages(page_bytes, share, max_model_len, settings.max_running, settings.page_tokens)
    else:
        n_pages = settings.kv_cache_bytes // page_bytes
        if n_pages < 1:
            raise ConfigError(
                f"kv_cache_bytes={settings.kv_cache_bytes} is less than one page, which takes {page_bytes} bytes. Raise it."
            )
        if settings.kv_cache_bytes > free:
            raise CapacityError(
                f"kv_cache_bytes={settings.kv_cache_bytes} ({format_bytes(settings.kv_cache_bytes)}) is more than the "
                f"{format_bytes(free)} of memory that is free. Lower it."
            )
    n_pages = min(n_pages, policy.MAX_PAGES)
    if n_pages * settings.page_tokens < max_model_len:
        if settings.max_model_len is not None:
            raise CapacityError(
                f"max_model_len={max_model_len} needs {format_bytes(max_model_len * token)} of KV cache "
                f"and there is {format_bytes(n_pages * page_bytes)}. Lower max_model_len or raise kv_cache_bytes."
            )
        max_model_len = n_pages * settings.page_tokens
    if max_model_len < 2:
        raise ConfigError(f"max_model_len={max_model_len} must be at least 2, for a prompt token and one of the answer.")
    # More pages than every running request at full length can fill would never be used.
    n_useful = settings.max_running * -(-max_model_len // settings.page_tokens)
    return SchedulerConfig(
        settings.token_budget, settings.max_running, settings.page_tokens, min(n_pages, n_useful), max_model_len,
        spec.window_of_every_layer, settings.separate_prefixes, scored_rows(spec.vocab_size), draft_rows=draft_rows,
    )  # fmt: skip
