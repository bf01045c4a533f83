"""The ledger entry of one server: what the planner expected when it started, what it then was."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from twostroke.core.errors import ConfigError, TwostrokeError
from twostroke.core.families import read_config, spec_from_config
from twostroke.ledger.store import Ledger
from twostroke.planner.hardware import load_hardware
from twostroke.planner.intervals import predict_with_intervals
from twostroke.planner.serving import ServingShape, plan_serving
from twostroke.quantization.schemes import stored_scheme
from twostroke.server import wire
from twostroke.server.launch import EngineOptions

log = logging.getLogger("twostroke.server")


def scheme_of(directory: Path, dtype: str) -> str:
    """How the engine will hold the weights: ``dtype``, or what "auto" comes to for this directory; 4 bits with their group."""
    stored = stored_scheme(directory)
    if stored is not None:
        return stored.name if stored.group is None else f"{stored.name}-g{stored.group}"
    return "bf16" if dtype == "auto" else dtype


class ServeRecord:
    """Frozen in the ledger before the model is loaded. A ledger that cannot be written never keeps a server from starting:
    it is said in the log, and ``run_id`` is None."""

    def __init__(self, directory: Path, options: EngineOptions) -> None:
        self.run_id: str | None = None
        self._directory = directory
        self._inputs: dict[str, object] = {"directory": str(directory), **asdict(options)}
        try:
            prediction = self._predict(directory, options)
        except TwostrokeError as error:
            log.warning("no prediction for the ledger: %s", error)
            prediction = {}
        try:
            self.run_id = Ledger().freeze("serve", directory.resolve().name, self._inputs, prediction)
        except (TwostrokeError, OSError) as error:
            log.warning("the ledger could not be written: %s", error)

    def _predict(self, directory: Path, options: EngineOptions) -> Mapping[str, object]:
        spec = spec_from_config(read_config(directory))
        longest = min(options.max_model_len or spec.max_positions, spec.max_positions)
        # One request that fills half of a short context and at most 512 tokens of a long one: the planner's usual shape.
        prompt = max(1, min(512, longest // 2))
        shape = ServingShape(
            scheme=scheme_of(directory, options.dtype),
            head_dtype=options.head_dtype or "auto",
            kv_dtype=options.kv_dtype or "auto",
            batch=1,
            prompt_tokens=prompt,
            output_tokens=max(1, min(128, longest - prompt)),
            kv_cache_bytes=options.kv_cache_bytes or 0,
            max_model_len=longest,
        )
        if longest < 2:
            raise ConfigError("max_model_len=1 leaves no room for an answer.")
        hardware = load_hardware("this", "serve")
        self._inputs["device"] = hardware.label
        return predict_with_intervals(plan_serving(spec, shape, hardware).prediction(), hardware, "serve")

    def started(self, ready: wire.Ready, startup_s: float) -> None:
        values = {
            "startup_s": startup_s,
            "weights_bytes": ready.weights_bytes,
            "kv_cache_bytes": ready.kv_cache_bytes,
            "model_bytes": sum(file.stat().st_size for file in self._directory.glob("*.safetensors")),
        }
        self._measure(values, "partial")

    def stopped(self, totals: Mapping[str, float]) -> None:
        self._measure({f"served_{name}": value for name, value in totals.items()}, "finished")

    def _measure(self, values: Mapping[str, float], status: str) -> None:
        if self.run_id is None:
            return
        try:
            Ledger().measure(self.run_id, values, status)
        except (TwostrokeError, OSError) as error:
            log.warning("the ledger could not be written: %s", error)
