"""``Engines``: what the server asks of its engines, be it one or several."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.token_stream import TokenStream


class Engines(Protocol):
    """One engine, or several alike that are used as one."""

    @property
    def info(self) -> wire.Ready | None: ...

    @property
    def fingerprints(self) -> set[str]: ...

    @property
    def adapters(self) -> Mapping[str, str]: ...

    @property
    def restarts(self) -> int: ...

    @property
    def ready(self) -> bool: ...

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        wake: asyncio.Event,
        priority: int = 0,
        client: str = "",
        timeout_s: float | None = None,
        whole: bool = False,
        lora: str | None = None,
    ) -> list[TokenStream]: ...

    async def change_adapter(self, name: str, directory: str | None) -> None: ...

    @property
    def weights(self) -> str | None: ...

    @property
    def tags(self) -> bool: ...

    @property
    def asleep(self) -> int: ...

    @property
    def dozes(self) -> bool: ...

    async def change_weights(self, directory: str, carry_on: bool) -> wire.WeightsChanged: ...

    async def sleep(self, level: int, wakes: bool) -> wire.Slept: ...

    async def wake(self) -> None: ...

    async def stats(self) -> dict[str, float]: ...

    def rows(self) -> list[dict[str, float]]: ...

    @property
    def streams(self) -> tuple[TokenStream, ...]: ...

    async def run(self) -> None: ...

    async def wait_loaded(self) -> wire.Ready: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...
