"""One engine that decodes, and others on this machine that compute its prompts (``handover``), as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from twostroke.core.errors import TwostrokeError
from twostroke.server import wire
from twostroke.server.engine_client import EngineClient
from twostroke.server.launch import EngineChild

log = logging.getLogger("twostroke.server")

OF_PREFILL = ("lent_", "prefill_", "mixed_")
"""Beginnings of the counters to which those of engines that prefill are added. Their other counters would count a request
twice."""


class DecodingEngine(EngineClient):
    """The engine that has the requests. ``prefills`` start the others, once it has loaded: it has then left its packed weights,
    which all map. One of them that is lost is started anew; meanwhile this one computes the prompts."""

    def __init__(
        self, launch: Callable[[], EngineChild], first: EngineChild | None, adapters: Mapping[str, str],
        prefills: Sequence[Callable[[], EngineChild]],
    ) -> None:  # fmt: skip
        super().__init__(launch, first, adapters=adapters)
        self.prefills = [EngineClient(each) for each in prefills]

    def rows(self) -> list[dict[str, float]]:
        own = super().rows()
        return own + [row for engine in self.prefills for row in engine.rows()]

    async def stats(self, timeout_s: float = 1.0) -> dict[str, float]:
        """Its own counters; those of steps with prompts are of all."""
        own, *others = await asyncio.gather(super().stats(timeout_s), *(each.stats(timeout_s) for each in self.prefills))
        total = dict(own)
        for values in others:
            for name, value in values.items():
                if name.startswith(OF_PREFILL):
                    total[name] = total.get(name, 0.0) + value
        return total

    async def wait_loaded(self) -> wire.Ready:
        ready = await super().wait_loaded()
        for each in self.prefills:
            await each.wait_loaded()
        return ready

    async def run(self) -> None:
        tasks = [asyncio.create_task(super().run()), *(asyncio.create_task(self._run_beside(each)) for each in self.prefills)]
        try:
            await asyncio.gather(*tasks)
        finally:
            self.close()
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_beside(self, engine: EngineClient) -> None:
        await super().wait_loaded()
        if not self._closing.is_set():
            await engine.run()

    async def change_weights(self, directory: str, carry_on: bool) -> wire.WeightsChanged:
        """As of one engine; the others follow. Until they have, this one computes its prompts itself."""
        changed = await super().change_weights(directory, carry_on)
        for i, each in enumerate(self.prefills):
            try:
                await each.change_weights(directory, carry_on)
            except TwostrokeError as error:
                log.error("prefill engine %d is started anew with the new weights: %s", i, error)
                each.weights = directory
                each.kill()
        return changed

    async def sleep(self, level: int, wakes: bool) -> wire.Slept:
        """As of one engine, of all that are there. If this one refuses, none sleeps."""
        slept = await super().sleep(level, wakes)
        for each in self.prefills:
            try:
                slept.freed_bytes += (await each.sleep(level, wakes)).freed_bytes
            except TwostrokeError as error:
                log.warning("a prefill engine does not sleep: %s", error)
        return slept

    async def wake(self) -> None:
        await super().wake()
        for each in self.prefills:
            await each.wake()

    def close(self) -> None:
        super().close()
        for each in self.prefills:
            each.close()

    def kill(self) -> None:
        super().kill()
        for each in self.prefills:
            each.kill()
