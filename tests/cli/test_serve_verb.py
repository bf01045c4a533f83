"""``twostroke serve``: bad input in one sentence before anything starts, and one line when it is ready."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

import machines
from real_model import make_model
from twostroke.cli.main import main
from twostroke.core.profile import read_fingerprint, save_profile
from twostroke.ledger.scoring import compare
from twostroke.ledger.store import Ledger

HITS = "twostroke_prefix_hit_tokens"
SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *args])
    error = capsys.readouterr().err
    assert error.count("\n") == 1, "one sentence"
    return int(caught.value.code or 0), error


def test_a_model_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, error = refused(capsys, str(tmp_path / "nowhere"))
    assert code == 2
    assert "does not exist" in error


def test_more_engines_than_processors_are_refused(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    for n in (len(os.sched_getaffinity(0)) + 1, 10**9):
        code, error = refused(capsys, str(model), "--replicas", str(n))
        assert code == 2
        assert f"--replicas={n} must not be more than the processors" in error
    assert refused(capsys, str(model), "--replicas", "0")[0] == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--model", "b={model}", "--models-memory-gib", "1", "--admin"), "--model and --admin do not go together"),
        (("--model", "b={model}", "--models-memory-gib", "1", "--ray"), "--model and --ray do not go together"),
        (("--prefill-engines", "1", "--replicas", "2"), "--prefill-engines and --replicas do not go together"),
        (("--mode", "latency", "--ray"), "--mode and --ray do not go together"),
        (("--role", "prefill", "--listen", "/s", "--kv-events", "http"), "--role prefill and --kv-events do not go together"),
        (("--role", "decode", "--peer", "/s", "--ray"), "--role and --ray do not go together"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], model: Path, given: tuple[str, ...], said: str
) -> None:
    code, error = refused(capsys, str(model), *(word.format(model=model) for word in given))
    assert code == 2
    assert said in error


def test_a_folder_without_a_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, error = refused(capsys, str(tmp_path))
    assert code == 2
    assert error.startswith(f"error: model {tmp_path} is not a model directory: it holds no config.json.")


def test_a_broken_config_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    code, error = refused(capsys, str(tmp_path))
    assert code == 2
    assert "not valid JSON" in error


def test_other_machines_are_not_let_in_without_a_key(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, error = refused(capsys, str(model), "--host", "0.0.0.0")
    assert code == 2
    assert "--api-key-file" in error


def test_a_key_file_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    code, error = refused(capsys, str(model), "--api-key-file", str(tmp_path / "keys"))
    assert code == 2
    assert "keys does not exist" in error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kv-events", "http://here"], "must be an address, as tcp://*:5557 or ipc:///run/file"),
        (["--kv-events", "tcp://*:5557", "--kv-events-replay", "http"], "--kv-events-replay http must be an address"),
        (["--kv-events-topic", "kv@a@b"], "are of --kv-events. Give it, or leave them out"),
        (["--kv-events", "http", "--kv-events-topic", "kv@a@b"], "--kv-events http has no topic"),
        (["--kv-events", "http", "--api-key-file", "KEYS"], "Give --share-prefixes if the keys trust each other"),
        (["--otlp-endpoint", "localhost:4318"], "must be a URL of a collector, as http://localhost:4318"),
    ],
)
def test_events_and_traces_that_cannot_be_sent_are_refused(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    (tmp_path / "keys").write_text("sesame\n")
    words = [str(tmp_path / "keys") if word == "KEYS" else word for word in options]
    code, error = refused(capsys, str(model), "--port", "0", *words)
    assert (code, says in error) == (2, True), error


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = refused(capsys, str(model), "--port", str(port))
    assert code == 1
    assert f"port {port}" in error
    assert "--port" in error


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--dtype", "fp12"], "fp12"),
        (["--max-model-len", "100000"], "100000"),
        (["--kv-cache-gib", "0.0000001"], "--kv-cache-gib 0.0000001 is less than one page"),
    ],
)
def test_what_only_the_engine_can_refuse_is_one_sentence_too(
    model: Path, tmp_path: Path, options: list[str], sentence: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--json", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "TWOSTROKE_HOME": str(tmp_path)},
    )
    assert done.returncode == 2, done.stderr
    assert sentence in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr


def test_it_says_when_it_is_ready_records_what_it_measured_and_exits_0(model: Path, twostroke_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--served-name", "mine"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "TWOSTROKE_HOME": str(twostroke_home)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert line.startswith("serving mine (")
    assert "http://127.0.0.1:" in line
    assert "ready in" in line
    assert line.endswith("/ is a page to chat with it\n")
    assert output == ""
    (run,) = Ledger(twostroke_home / "ledger.sqlite").runs("serve")
    assert run.status == "finished"
    assert 0 < run.measurement["startup_s"] < 60
    assert run.measurement["weights_bytes"] > 0
    assert run.measurement["kv_cache_bytes"] > 0
    assert run.measurement["served_requests"] == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two processors")
def test_two_engines_answer_as_one_each_on_processors_of_its_own(model: Path, twostroke_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--replicas", "2", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        document = ""
        while not document.rstrip().endswith("}"):
            document += process.stdout.readline()
        said = json.loads(document)
        assert said["replicas"] == 2
        children = [p for p in psutil.Process(process.pid).children() if "twostroke.server.engine_process" in p.cmdline()]
        first, second = (set(child.cpu_affinity()) for child in children)
        assert not first & second
        assert first | second == os.sched_getaffinity(0)
        body = {"model": said["model"], "prompt": list(range(1, 40)), "max_tokens": 8, "temperature": 0}
        with httpx.Client(base_url=said["url"], trust_env=False, timeout=60) as web:
            texts = [web.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(3)]
            shown = web.get("/metrics").text
        assert texts == texts[:1] * 3
        assert 'twostroke_replica_up{replica="1"} 1.0' in shown
        hits = float(re.search(rf"^{HITS} (\S+)$", shown, re.MULTILINE)[1])  # type: ignore[index]
        known = sum(map(float, re.findall(r"^twostroke_replica_prompt_tokens_known\{\S+ (\S+)$", shown, re.MULTILINE)))
        assert hits >= known >= 64, "it went where its 32 tokens were known"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "no prediction: plans know one engine" in errors
    finally:
        process.kill()
        process.wait()


def ask(url: str, prompt: list[int], n_tokens: int) -> None:
    body = {"model": "mine", "prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == n_tokens


@pytest.mark.parametrize(("prompt_tokens", "output_tokens", "alike"), [(256, 128, True), (20, 5, False)])
def test_every_quantity_of_the_prediction_is_measured_or_has_a_reason(
    model: Path, twostroke_home: Path, prompt_tokens: int, output_tokens: int, alike: bool
) -> None:
    """The model holds 512 positions, so one request of 256 + 128 tokens is predicted."""
    save_profile(replace(machines.profile(), fingerprint=read_fingerprint()))
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--served-name", "mine", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "TWOSTROKE_HOME": str(twostroke_home)},
    )
    assert process.stdout is not None
    document = ""
    while "}" not in document:
        document += process.stdout.readline()
    url = json.loads(document)["url"]
    for i in range(3):
        ask(url, [(i + j) % 100 + 3 for j in range(prompt_tokens)], output_tokens)
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    (run,) = Ledger(twostroke_home / "ledger.sqlite").runs("serve")
    found, shape = run.measurement, run.inputs["shape"]
    assert (shape["prompt_tokens"], shape["output_tokens"]) == (256, 128)
    assert found["served_median_prompt_tokens"] == prompt_tokens
    assert set(run.prediction) == {name for name in run.prediction if name in found} | set(found["not_measured"])
    assert not set(found["not_measured"]) & set(found)
    for name in ("ttft_s", "tpot_s", "e2e_s", "prefill_tok_per_s", "decode_tok_per_s", "output_tok_per_s"):
        assert found[name if alike else f"served_{name}"] > 0
        assert (name in found) == alike
        assert alike or "served were medians of 20 + 5 tokens" in found["not_measured"][name]
    for name in ("peak_memory_bytes", "http_peak_memory_bytes"):
        assert 2e7 < found[name] < 4e9
    assert "counter" in found["not_measured"]["energy_per_mtok_kwh"]
    scored = {row.name for row in compare(run) if row.error_percent is not None}
    assert {"peak_memory_bytes", "weights_bytes", "startup_s"} <= scored
    assert ("ttft_s" in scored) == alike
    assert "twostroke_engine_peak_memory_bytes" in metrics
    assert "twostroke_http_peak_memory_bytes" in metrics
    (generated,) = re.findall(r"^twostroke_engine_output_tokens (\S+)$", metrics, re.MULTILINE)
    assert 3 * output_tokens <= float(generated) <= 3 * output_tokens + 4  # the engine warms up with a few of its own
    for name in ("ttft", "tpot", "e2e"):
        labels = f'latency="{name}",output_tokens="128",prompt_tokens="256"'
        (shown,) = re.findall(rf"twostroke_predicted_seconds{{{labels}}} (\S+)", metrics)
        assert float(shown) == pytest.approx(run.prediction[f"{name}_s"]["value"])


@pytest.mark.parametrize(("options", "found"), [([], [0, 0, 32, 32]), (["--share-prefixes"], [0, 32, 32, 32])])
def test_a_key_finds_another_keys_prompts_in_the_cache_only_where_that_is_asked_for(
    model: Path, twostroke_home: Path, options: list[str], found: list[int]
) -> None:
    keys = twostroke_home / "keys"
    keys.write_text("alpha\nbeta\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0", "--api-key-file", str(keys), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "TWOSTROKE_HOME": str(twostroke_home)},
    )
    try:
        assert process.stdout is not None
        url = re.search(r"http://127[.\d:]+", process.stdout.readline())[0]  # type: ignore[index]

        def hits(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": model.name, "prompt": [5] * 33, "max_tokens": 1}
            assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
            text = httpx.get(f"{url}/metrics", headers=headers).text
            return int(float(next(v for n, _, v in (x.partition(" ") for x in text.splitlines()) if n == HITS)))

        before, gained = 0, []
        for key in ("alpha", "beta", "alpha", "beta"):
            now = hits(key)
            gained.append(now - before)
            before = now
        assert gained == found
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
