"""Ranks that are killed, stopped or stuck: all notice, start again from the last checkpoint, and end in the same bits."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from killing import fingerprint
from launched import LOOP, SLEEP, SLEEP_IN_SAVE, SLOW, Launched
from ranked import RankRunner

from twostroke.cli.hosts import Alone, Hosts, free_port
from twostroke.cli.launch import Launch, _next_size
from twostroke.cli.notices import check_notice, has_come
from twostroke.cli.rank_processes import Ended
from twostroke.core.errors import InputError
from twostroke.core.parallel_recipe import ParallelRecipe
from twostroke.core.recipe import TrainRecipe
from twostroke.training.checkpoint import list_checkpoints
from twostroke.training.start import train
from twostroke.training.stragglers import RankTimes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hangs are found by what Linux tells of threads")

Launcher = Callable[..., Launched]

LOST = 50
"""Ranks that are lost in a layout by `make soak`."""

FAULTS = [
    (signal.SIGKILL, 0, "rank 0 was ended by SIGKILL in step"),
    (signal.SIGSTOP, 1, "rank 1 is stopped (SIGSTOP) in step"),
    (SLEEP, 0, "rank 0 has slept for"),
    (LOOP, 1, "rank 1 has computed for"),
    (SLEEP_IN_SAVE, 0, "while a checkpoint was written"),
]


@pytest.fixture
def launch() -> Iterator[Launcher]:
    """`Launched`, whose processes end with the test, also with one that fails."""
    runs: list[Launched] = []

    def launch(*arguments: Any) -> Launched:
        runs.append(Launched(*arguments))
        return runs[-1]

    yield launch
    for run in runs:
        run.end()


def long_recipe(make_recipe: Any, name: str, steps: int, shard: int = 2, in_background: bool = True) -> TrainRecipe:
    settings = {"steps": steps, "checkpoint_every": 20, "checkpoint_in_background": in_background}
    recipe = make_recipe(name, grad_accumulation=2, batch_size=1, **settings)
    return dataclasses.replace(recipe, parallel=ParallelRecipe(shard=shard))


def undisturbed(make_recipe: Any, steps: int) -> dict[str, str]:
    recipe = long_recipe(make_recipe, "undisturbed", steps, shard=1)
    train(recipe)
    return fingerprint(Path(recipe.output))


@pytest.mark.parametrize(
    "faults", [FAULTS[0::3], pytest.param(FAULTS[1:3] + FAULTS[4:], marks=pytest.mark.soak)], ids=["first", "second"]
)
def test_ranks_that_are_lost_start_again_and_end_in_the_same_bits(
    make_recipe: Any, launch: Launcher, tmp_path: Path, faults: list[tuple[int, int, str]]
) -> None:
    steps = 200
    recipe = long_recipe(make_recipe, "run", steps, in_background=False)
    run = launch(recipe, tmp_path / "faults", 2, ["--max-restarts", str(len(faults))])
    for n_before, (number, rank, words) in enumerate(faults):
        run.wait_for_step(run.step() + 30)
        gone_s, told = run.do(number, rank)
        print(f"{gone_s:.2f} s: {told}")
        assert words in told, run.said
        assert "checkpoint step-" in told
        assert gone_s < (5 if number in (signal.SIGKILL, signal.SIGSTOP) else 20), run.said  # a hang begins later
        run.wait_for(lambda n=n_before: run.said.count("the first step after that") > n)  # type: ignore[misc]
    assert run.ended() == 0, run.said
    print(re.findall(r".* after [0-9.]+ s\.", run.said))
    for number, name in ((SLEEP, "in _sleep"), (LOOP, "in _loop")):
        assert (name in run.said) == any(fault[0] == number for fault in faults)  # the stacks of those that were stuck
    assert all(float(found) < 20 for found in re.findall(r"stand again after ([0-9.]+) s", run.said)), run.said
    assert fingerprint(Path(recipe.output)) == undisturbed(make_recipe, steps)


def test_restarts_are_counted_and_a_straggler_is_named(make_recipe: Any, launch: Launcher, tmp_path: Path) -> None:
    run = launch(long_recipe(make_recipe, "run", 100_000, shard=1), tmp_path / "faults", 2, ["--max-restarts", "1"])
    run.wait_for_step(5)
    run.ranks()[1].send_signal(SLOW)
    run.wait_for(lambda: "rank 1 computes" in run.said)
    line = json.loads((Path(run.output) / "log.jsonl").read_text().splitlines()[-2])
    assert len(line["rank_compute_s"]) == len(line["rank_waiting_s"]) == 2
    assert line["straggler_ratio"] > 1.25
    assert line["rank_waiting_s"][0] > line["rank_waiting_s"][1]
    run.do(signal.SIGKILL, 1)
    run.wait_for(lambda: "the first step after that" in run.said)
    run.ranks()[0].kill()
    assert run.ended() == 1
    assert re.search(r"error: rank 0 was ended by SIGKILL .* after 1 restarts, and the others stopped\. Checkpoint", run.said)


def test_an_interruption_notice_ends_with_a_checkpoint(make_recipe: Any, launch: Launcher, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    recipe = long_recipe(make_recipe, "run", 100_000)
    run = launch(recipe, tmp_path / "faults", 2, ["--interruption-notice", str(notice)])
    run.wait_for_step(5)
    notice.touch()
    assert run.ended() == 75, run.said
    step = re.search(r"stopped at step (\d+) of", run.said)
    assert step is not None
    assert list_checkpoints(Path(recipe.output) / "checkpoints")[-1][0] == int(step.group(1))


def test_two_hosts_train_one_run_and_start_again_together(make_recipe: Any, launch: Launcher, tmp_path: Path) -> None:
    steps = 100
    recipe = long_recipe(make_recipe, "run", steps)
    place = ["--rendezvous", f"127.0.0.1:{free_port()}", "--hosts", "2", "--max-restarts", "1"]
    first, second = (
        launch(recipe, tmp_path / f"host-{i}", 1, [*place, "--host-index", str(i)]) for i in range(2)
    )  # fmt: skip
    first.wait_for_step(25)
    second.ranks()[1].kill()
    assert first.ended() == 0, first.said
    assert second.ended() == 0, second.said
    assert "rank 1 was ended by SIGKILL" in first.said
    assert fingerprint(Path(recipe.output)) == undisturbed(make_recipe, steps)


def _without_room(ranks: Any, recipe: TrainRecipe, full: int, lines: str) -> str:
    """The disk takes no file above 4 KB on rank ``full``, from its second checkpoint to its third."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(step: int) -> bool:
        if ranks.rank == full and step in (3, 5):
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if step == 3 else most, most))
        return False

    def log(line: str) -> None:
        with open(lines, "a") as stream:
            stream.write(line + "\n")

    return str(train(recipe, ranks=ranks, should_stop=limit, log=log).summary["weights_sha256"])


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_one_rank_loses_nothing(make_recipe: Any, tmp_path: Path, full: int) -> None:
    runner = RankRunner(tmp_path)
    settings = {"steps": 8, "grad_accumulation": 2, "checkpoint_every": 2, "checkpoint_in_background": False}
    recipe, whole = (
        dataclasses.replace(make_recipe(name, **settings), parallel=ParallelRecipe(shard=2 if name == "full" else 1))
        for name in ("full", "whole")
    )
    lines = tmp_path / "lines"
    answers = runner.call(_without_room, 2, recipe, full, str(lines))
    assert [kind for kind, *_ in answers] == ["done"] * 2, answers
    train(whole)
    assert fingerprint(Path(recipe.output)) == fingerprint(Path(whole.output))
    told = lines.read_text() if lines.is_file() else ""
    assert ("checkpoint step-00000004 was not written" in told) == (full == 0)
    assert ("step-00000002 is kept. Training continues." in told) == (full == 0)


def test_a_straggler_is_named_once_and_its_end_too() -> None:
    class Two:
        n, is_first = 2, True

        class progress:
            waited_s = 0.0

        def numbers(self, own: Any) -> Any:
            return [[1.0, 1.0], [self.slow, 0.0]]

    ranks, lines = Two(), []
    times = RankTimes(ranks, lines.append)  # type: ignore[arg-type]
    for slow, n in ((2.0, 40), (1.0, 40)):
        ranks.slow = slow
        for _ in range(n):
            line = times.after_step(2.0, False)
        assert line["straggler_ratio"] == slow
    assert lines == [
        "rank 1 computes 2.00 times as long as the median rank (2 against 1 s, over 20 steps of 2 s), and the others wait for "
        "it.",
        "rank 1 computes about as long as the others again.",
    ]


def test_fewer_ranks_are_taken_if_no_step_was_done() -> None:
    launch = Launch([], Path(), 4, 1, False, lambda n: n in (1, 2, 4), 3, min_ranks=2)
    assert _next_size(launch, 4, Ended(lost="x", stepped=True)) == 4
    assert _next_size(launch, 4, Ended(lost="x")) == 2
    assert _next_size(launch, 2, Ended(lost="x")) == 2
    assert _next_size(launch, 2, Ended(lost="x", stepped=True)) == 4
    assert _next_size(dataclasses.replace(launch, min_ranks=None), 4, Ended(lost="x")) == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-restarts", "1"], "--max-restarts needs --ranks N"),
        (["--host-index", "0"], "--host-index needs --ranks N"),
        (["--ranks", "2", "--max-restarts", "-1"], "--max-restarts -1 must be at least 0"),
        (["--ranks", "2", "--min-ranks", "3"], "--min-ranks 3 must be from 1 to the 2 ranks"),
        (["--ranks", "2", "--hosts", "2"], "--rendezvous and --host-index must be given too"),
        (["--ranks", "2", "--interruption-notice", "ftp://x"], "must be a path, or begin with http:// or https://"),
    ],
)
def test_bad_options_are_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    from typer.testing import CliRunner

    from twostroke.cli.train_verb import app

    file = tmp_path / "recipe.toml"
    file.write_text('output = "x"\n[data]\nsources = ["x"]\n[model]\nn_layers = 1\nd_model = 8\nn_heads = 1\nd_ff = 8\n'
                    "[train]\nsteps = 1\ngrad_accumulation = 2\n")  # fmt: skip
    caught = CliRunner().invoke(app, [str(file), *options]).exception
    assert isinstance(caught, InputError)
    assert sentence in str(caught)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (("h", 2, 0), "--rendezvous h must be HOST:PORT"),
        (("h:1", 1, 0), "--hosts 1 must be at least 2"),
        (("h:1", 2, 2), "--host-index 2 must be from 0 to 1"),
    ],
)
def test_hosts_that_cannot_be_are_one_sentence(place: tuple[str, int, int], sentence: str) -> None:
    assert isinstance(Hosts.parse(None, None, None), Alone)
    with pytest.raises(InputError, match=re.escape(sentence)):
        Hosts.parse(*place)


def test_notices_of_clouds(tmp_path: Path) -> None:
    answers: dict[str, tuple[int, str]] = {
        "/aws": (404, ""), "/aws-now": (200, '{"action": "terminate", "time": "2026-11-24T08:22:00Z"}'),
        "/google": (200, "FALSE"), "/google-now": (200, "TRUE"),
        "/azure": (200, '{"DocumentIncarnation": 1, "Events": []}'),
        "/azure-now": (200, '{"DocumentIncarnation": 2, "Events": [{"EventType": "Preempt"}]}'),
    }  # fmt: skip

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answers[self.path]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert {path: has_come(url + path) for path in answers} == {path: path.endswith("-now") for path in answers}
    server.shutdown()
    server.server_close()
    assert not has_come(f"{url}/aws-now")  # nobody answers
    with pytest.raises(InputError, match="its folder does not exist"):
        check_notice(str(tmp_path / "no" / "notice"))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shard", [1, 2])
def test_a_hundred_lost_ranks(make_recipe: Any, launch: Launcher, tmp_path: Path, shard: int) -> None:
    """Kills, stops and hangs of any rank, at moments drawn at random, also before ranks stand and in saves; 50 a layout."""
    draw, steps = random.Random(shard), 4000
    recipe = long_recipe(make_recipe, "run", steps, shard)
    run = launch(recipe, tmp_path / "faults", 2, ["--max-restarts", "1000"])
    noticed, in_start = [], 0
    for _ in range(LOST):
        if draw.random() < 0.15:  # while ranks start
            run.wait_for(lambda: len(run.ranks()) == 2)
            time.sleep(draw.uniform(0, 4))
            in_start += "the first step" not in run.lines[-1]
        else:
            run.wait_for_step(run.step() + draw.randrange(1, 45))
        ranks = run.ranks()
        if len(ranks) < 2:  # another one was lost just now
            continue
        number = draw.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP])
        noticed.append(run.do(number, draw.randrange(2))[0])
    assert run.ended(1200) == 0, run.said[-4000:]
    stood, stepped = (
        [float(s) for s in re.findall(rf"{words} after ([0-9.]+) s", run.said)] for words in ("stand again", "was done")
    )
    in_save = run.said.count("while a checkpoint was written")
    print(f"shard {shard}: {len(noticed)} lost, {in_start} while ranks started, {in_save} in a save")
    for what, seconds in (("noticed", noticed), ("stood", stood), ("first step", stepped)):
        ordered = sorted(seconds)
        middle, most = ordered[len(ordered) // 2], ordered[int(0.95 * len(ordered))]
        print(f"{what}: median {middle:.2f} s, 95% {most:.2f} s, longest {ordered[-1]:.2f} s")
    assert fingerprint(Path(recipe.output)) == undisturbed(make_recipe, steps)
