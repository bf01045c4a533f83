"""What Ray Serve runs: a deployment of the ingress and one of the engine's replicas, and how they are scaled."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from twostroke.server.keys import ApiKeys
from twostroke.server.launch import ServeSettings
from twostroke.server.ray_serve.ingress import Ingress
from twostroke.server.ray_serve.replica import EngineReplica
from twostroke.server.ray_serve.settings import Scale, check_replicated

ENGINE = "engine"
"""Name of the replicas' deployment."""
LOOK_S = 1.0
"""How often a replica says whether it takes requests."""
TELLS_S = 1.0
"""How often replicas and the ingress tell the autoscaler what they have. With Ray's default, 10, the first request of a server
without replicas waited eight seconds before one was even started."""
LOOK_BACK_S = 10.0
"""Seconds over which the autoscaler averages. Ray's own default, 30, is for replicas that take a minute to start."""
UPSCALE_S = 5.0
"""How long more replicas must have been needed before one is started: about as long as it takes to start."""
HEALTH_PERIOD_S = 5.0
START_TRIES = 2
"""Times that a replica may fail to load before the application counts as failed."""


def application(settings: ServeSettings, scale: Scale, local_only: bool) -> serve.Application:
    """Raises ConfigError for settings that several replicas cannot keep."""
    check_replicated(settings, scale)
    policy = AutoscalingPolicy(
        policy_function="twostroke.server.ray_serve.scaling:OngoingAndPredicted",
        policy_kwargs={"target_ongoing": scale.target_ongoing, "target_wait_s": scale.target_wait_s},
    )
    with warnings.catch_warnings():
        # Deprecated for variables of the environment, which Ray 2.60 does not read where it schedules what is told.
        warnings.filterwarnings("ignore", ".*metrics_interval_s", DeprecationWarning)
        scaling = AutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=scale.target_ongoing,
            metrics_interval_s=TELLS_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=UPSCALE_S,
            downscale_delay_s=scale.scale_down_s,
            policy=policy,
        )
    router = RequestRouterConfig(
        request_router_class="twostroke.server.ray_serve.request_router.FirstTokenRouter",
        request_routing_stats_period_s=LOOK_S,
    )
    replicas = serve.deployment(Replica).options(
        name=ENGINE,
        ray_actor_options={"num_cpus": scale.replica_cpus},
        autoscaling_config=scaling,
        request_router_config=router,
        max_ongoing_requests=settings.max_concurrent,
        max_queued_requests=settings.max_concurrent,
        graceful_shutdown_timeout_s=settings.grace_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        max_constructor_retry_count=START_TRIES,
    )
    ingress = serve.deployment(serve.ingress()(IngressReplica)).options(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * settings.max_concurrent * scale.max_replicas + 64,
        graceful_shutdown_timeout_s=settings.grace_s,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(replicas.bind(settings, local_only), settings.api_key_file, local_only, scale.min_replicas == 0)


class Replica(EngineReplica):
    """The replicas' deployment."""

    async def __del__(self) -> None:  # what Ray calls, and awaits
        await self.shutdown()


class IngressReplica:
    """The ingress' deployment. There is one, because it alone knows what it has sent where."""

    def __init__(self, replicas: Any, api_key_file: Path | None, local_only: bool, starts: bool) -> None:
        name = serve.get_replica_context().app_name

        def running() -> int:
            states = serve.status().applications[name].deployments[ENGINE].replica_states
            return states.get("RUNNING", 0)

        keys = None if api_key_file is None else ApiKeys.read(api_key_file)
        self._ingress = Ingress(replicas, running, keys, local_only, starts)
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> Ingress:
        return self._ingress

    async def about(self) -> dict[str, Any]:
        """What one of the replicas says of its engine."""
        found: dict[str, Any] = await self._replicas.about.remote()
        return found

    async def drain(self) -> dict[str, int]:
        """Take no more requests. Returns how many are still under way, and how many there were."""
        self._ingress.draining = True
        return {"in_flight": self._ingress.in_flight, "requests": self._ingress.requests}
