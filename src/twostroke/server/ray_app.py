"""The server as a Ray Serve application: one ingress, and as many replicas of the engine as the load needs.

``twostroke serve --ray`` runs it. On a cluster that is there already, ``serve deploy`` and KubeRay do, with the ``import_path``
``twostroke.server.ray_app:app`` and its `Arguments` (``deploy/kubernetes/rayservice.yaml``). Ray starts, watches and ends the
replicas and scales them; what they answer is `twostroke.server.http`'s, where a request goes is decided by
`ray_serve.request_router`, and how many replicas a load needs by `ray_serve.scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from twostroke.server.ray_serve.application import application
from twostroke.server.ray_serve.settings import Arguments


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, of the arguments in a Serve configuration (`Arguments`). Raises ConfigError."""
    settings, scale = Arguments.read(arguments).settings()
    return application(settings, scale, local_only=False)
