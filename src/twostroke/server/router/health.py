"""Asks the servers behind the router whether they live, and what they serve."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import httpx

from twostroke.server.router.endpoint import Endpoint

log = logging.getLogger("twostroke.router")

CHECK_S = 1.0
"""Time between two looks at a server."""
TIMEOUT_S = 5.0
PATHS = ("/ready", "/health", "/v1/models")
"""Of these the first that a server has says whether it takes requests: ours, vLLM's and llama.cpp's, anybody's."""
SILENCES = 2
"""Looks without an answer in time after which a server counts as dead."""
MODELS_EVERY = 10
"""Looks between two questions for its models."""
MAX_ANSWER_BYTES = 2**20


class Watch:
    """Looks at all ``endpoints``. ``key`` is sent to those that tell their models only to holders of one."""

    def __init__(self, client: httpx.AsyncClient, endpoints: Sequence[Endpoint], key: str = "") -> None:
        self._client = client
        self._endpoints = endpoints
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._paths: dict[str, str] = {}
        self._silent: dict[str, int] = {}
        self.dead = {endpoint.url: asyncio.Event() for endpoint in endpoints}
        """Set while nothing answers there. A server that says that it takes no requests may still finish what it has."""
        self.looked = asyncio.Event()
        """Set after the first look at each."""

    async def run(self) -> None:
        """Look until cancelled."""
        n = 0
        while True:
            await asyncio.gather(*(self._look(endpoint, n % MODELS_EVERY == 0) for endpoint in self._endpoints))
            self.looked.set()
            n += 1
            await asyncio.sleep(CHECK_S)

    async def _look(self, endpoint: Endpoint, models: bool) -> None:
        was_up = endpoint.up
        try:
            takes = await self._takes_requests(endpoint)
        except httpx.TimeoutException:
            # One silence may be a busy moment.
            self._silent[endpoint.url] = self._silent.get(endpoint.url, 0) + 1
            if self._silent[endpoint.url] >= SILENCES:
                self.lost(endpoint)
            return
        except httpx.HTTPError:
            self.lost(endpoint)
            return
        self._silent.pop(endpoint.url, None)
        self.dead[endpoint.url].clear()
        if takes != was_up:
            log.info("%s %s.", endpoint.url, "takes requests" if takes else "takes no requests")
        endpoint.up = takes
        if takes and (models or not was_up):
            endpoint.models = await self._models(endpoint)

    def lost(self, endpoint: Endpoint) -> None:
        """Nothing answers there: take it for dead until the next look finds it alive."""
        if endpoint.up or not self.dead[endpoint.url].is_set():
            log.error("%s does not answer.", endpoint.url)
        endpoint.up = False
        endpoint.forget()
        self.dead[endpoint.url].set()

    async def _takes_requests(self, endpoint: Endpoint) -> bool:
        known = self._paths.get(endpoint.url)
        for path in PATHS if known is None else (known,):
            status = (await self._client.get(endpoint.url + path, headers=self._headers, timeout=TIMEOUT_S)).status_code
            if status not in (404, 405):
                self._paths[endpoint.url] = path
                return status < 500
        self._paths.pop(endpoint.url, None)
        return False

    async def _models(self, endpoint: Endpoint) -> frozenset[str] | None:
        try:
            answer = await self._client.get(f"{endpoint.url}/v1/models", headers=self._headers, timeout=TIMEOUT_S)
            if answer.status_code != 200 or len(answer.content) > MAX_ANSWER_BYTES:
                return None
            return frozenset(str(each["id"]) for each in json.loads(answer.content)["data"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError):
            return None
