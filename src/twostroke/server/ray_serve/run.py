"""Runs the Ray Serve application from start to end, on a cluster of its own or on the one that RAY_ADDRESS names.

After SIGTERM or SIGINT the ingress takes no more requests, those in flight are finished (for at most the grace), and what was
started ends. A second signal ends it at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from twostroke.core.contention import processors
from twostroke.core.errors import ConfigError, EngineError
from twostroke.server.launch import ServeSettings, bind, is_loopback, process_age_s
from twostroke.server.ray_serve.settings import Scale, check_replicated
from twostroke.server.run import url_of

NAME = "twostroke"
OBJECT_STORE_BYTES = 100 * 2**20
"""Of a cluster of our own: nothing large passes through it."""
PROXY_START_S = 60
"""How long Ray Serve's HTTP proxy may take to start. After 5 s, Ray's own limit, it was ended before it ran where five programs
used two cores."""
_TICK_S = 0.1


def require_ray() -> None:
    """Raises ConfigError where Ray Serve is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        raise ConfigError("--ray needs Ray Serve, which is not installed. Run: pip install 'twostroke[ray]'") from None


def serve_on_ray(
    settings: ServeSettings, scale: Scale, host: str, port: int, on_ready: Callable[[dict[str, Any]], None]
) -> dict[str, float]:
    """Serve until a signal. ``on_ready`` gets what a server says that has started; where no replica runs at first, without what
    an engine says. Returns what was served. Raises ConfigError, and EngineError if no replica can load the model."""
    check_replicated(settings, scale)
    require_ray()
    with bind(host, port) as listener:  # a port that is taken is told in our words, before anything starts
        address = listener.getsockname()
    _join(scale)
    import ray
    from ray import serve

    from twostroke.server.ray_serve.application import application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    own, serving, stop = "RAY_ADDRESS" not in os.environ, False, threading.Event()

    def stopping(*_: object) -> None:
        if stop.is_set() or not serving:
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has just set its own, which print a trace and end
        signal.signal(number, stopping)
    try:
        _with_proxy(lambda: serve.start(http_options={"host": host, "port": address[1]}, logging_config=_quiet()))
        handle = _started(lambda: serve.run(
            application(settings, scale, is_loopback(host)), name=NAME, route_prefix="/", logging_config=_quiet()
        ))  # fmt: skip
        about = handle.about.remote().result() if scale.min_replicas else {}
        serving = True
        on_ready({"url": url_of(address), "startup_s": process_age_s()} | about)
        stop.wait()
        deadline = time.monotonic() + settings.grace_s
        while (state := handle.drain.remote().result())["in_flight"] and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        serve.delete(NAME)
        return {"requests": float(state["requests"])}
    except KeyboardInterrupt:
        return {}
    finally:
        if own:
            serve.shutdown()
        ray.shutdown()


def _join(scale: Scale) -> None:
    """Join the cluster of RAY_ADDRESS, or start one of this machine alone. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to Ray's makers
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PROXY_START_S))
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": NAME}
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            ray.init(address, **quiet)
        except ConnectionError:
            raise ConfigError(f"RAY_ADDRESS={address!r:.200} does not answer. Start Ray there, or unset it.") from None
        return
    there = len(processors())
    needed = scale.max_replicas * scale.replica_cpus
    if needed > there:
        raise ConfigError(
            f"{scale.max_replicas} replicas of {scale.replica_cpus} processors need {needed}, and this process may use "
            f"{there}. Lower --replicas or --replica-cpus, or set RAY_ADDRESS to a cluster's."
        )
    try:
        ray.init("local", num_cpus=there, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **quiet)
    except (RuntimeError, OSError, ValueError) as error:
        raise EngineError(f"Ray could not be started: {str(error).splitlines()[0]}") from None


def _quiet() -> dict[str, Any]:
    return {"log_level": "WARNING", "enable_access_log": False}


def _with_proxy(start: Callable[[], Any]) -> None:
    """Raises EngineError if Ray gives up waiting for its HTTP proxy, or ends it."""
    from ray.exceptions import RayError

    try:
        start()
    except (RayError, TimeoutError) as error:
        raise EngineError(
            f"Ray Serve's HTTP proxy did not start within {PROXY_START_S} s ({type(error).__name__}). If other programs keep "
            "the machine busy, try again when they are done."
        ) from None


def _started(run: Callable[[], Any]) -> Any:
    """Raises EngineError with the sentence of the replica that failed, which stands at the end of its traceback."""
    from ray import serve

    try:
        return run()
    except RuntimeError as error:
        said = [each.message for each in serve.status().applications[NAME].deployments.values()]
        lines = [line for text in (*said, str(error)) for line in text.splitlines()]
        ours = [line.partition(": ")[2] for line in lines if line.startswith("twostroke.core.errors.")]
        raise EngineError(f"no replica could start: {ours[-1] if ours else lines[-1]}") from None
