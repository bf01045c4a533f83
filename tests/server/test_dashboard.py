"""The Grafana dashboard asks for metrics that the server has, and its panels do not cover each other."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from twostroke.server.capture import Counts
from twostroke.server.metrics import Metrics

FILE = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "twostroke.json"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def test_every_metric_of_the_dashboard_exists(dashboard: dict[str, Any]) -> None:
    metrics = Metrics()
    metrics.follow_capture(Counts())
    metrics.observe(0.0, 0.1, 1.0, 5)
    metrics.predict({"ttft": 1.0}, 1, 1)
    metrics.responses.labels("other", "200").inc()
    lines = metrics.render({}).decode().splitlines()
    exist = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    asked = set(re.findall(r"twostroke_\w+", text + " ".join(v["query"] for v in dashboard["templating"]["list"])))
    assert len(asked) > 20
    assert asked <= exist, sorted(asked - exist)
    labels = set(re.findall(r"(\w+)=~?\"", text)) | set(re.findall(r"by \((\w+)\)", text))
    assert labels <= {"instance", "latency", "le", "status"}


def test_panels_have_a_place_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x, y in itertools.product(range(panel["gridPos"]["w"]), range(panel["gridPos"]["h"]))
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24
    for panel in panels:
        assert panel["targets"], panel["title"]
        for expression in (target["expr"] for target in panel["targets"]):
            assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]")), expression
