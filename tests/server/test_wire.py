"""Frames and messages between the HTTP process and the engine."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.server import wire
from twostroke.server.outgoing import in_frames

COMMANDS = [
    wire.Add("r1", [1, 2, 3], SamplingParams(temperature=0.5, seed=7, stop=("a", "b"), logprobs=3)),
    wire.Abort("r1"),
    wire.AskStats(4),
    wire.Shutdown(),
]
EVENTS = [
    wire.Ready("bf16", 2048, 16, 1, 2, 0.5),
    wire.Tokens(
        [wire.TokenDelta("r1", [5], [wire.TokenLogprobs(-0.5, [(5, -0.5), (6, -1.5)])], "stop"), wire.TokenDelta("r2", [])]
    ),
    wire.Failed(None, "engine", "gone"),
    wire.StatsReport(4, {"running": 1.0}),
    wire.Heartbeat(True, 0.25),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda m: type(m).__name__)
def test_commands_survive_the_wire(command: wire.Command) -> None:
    (payload,) = wire.FrameReader().feed(wire.encode(command))
    assert wire.decode_command(payload) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda m: type(m).__name__)
def test_events_survive_the_wire(event: wire.Event) -> None:
    (payload,) = wire.FrameReader().feed(wire.encode(event))
    assert wire.decode_event(payload) == event


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 7))
def test_frames_are_cut_the_same_however_the_bytes_arrive(payloads: list[bytes], step: int) -> None:
    stream = b"".join(struct.pack(">I", len(p)) + p for p in payloads)
    reader = wire.FrameReader()
    found = [p for start in range(0, len(stream), step) for p in reader.feed(stream[start : start + step])]
    assert found == payloads


def test_an_announced_length_over_the_limit_is_refused_before_its_bytes_arrive() -> None:
    with pytest.raises(wire.FrameError, match="4294967295"):
        list(wire.FrameReader().feed(b"\xff\xff\xff\xff"))


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(wire.FrameError, match="over the limit"):
        wire.encode(wire.Failed(None, "engine", "x" * wire.MAX_FRAME_BYTES))


@given(st.binary(max_size=200))
def test_no_bytes_decode_to_anything_but_a_known_command(payload: bytes) -> None:
    try:
        command = wire.decode_command(payload)
    except wire.FrameError:
        return
    assert isinstance(command, wire.Command)


def test_parameters_that_break_a_rule_are_a_frame_error() -> None:
    good = wire.encode(wire.Add("r", [1], SamplingParams(top_p=0.5)))[4:]
    bad = good.replace(struct.pack(">d", 0.5), struct.pack(">d", 7.0))
    assert bad != good
    with pytest.raises(wire.FrameError, match="holds no known message"):
        wire.decode_command(bad)


@pytest.mark.parametrize(("n_deltas", "n_scores", "n_top"), [(3000, 1, 1000), (1, 200_000, 20), (200_000, 0, 0)])
def test_whatever_a_step_brings_travels_in_frames_of_bounded_size(n_deltas: int, n_scores: int, n_top: int) -> None:
    """Every number in its longest encoding."""
    entry = wire.TokenLogprobs(-1e300, [(2**33, -1e300)] * n_top)
    if n_deltas == 1:
        parts = list(in_frames([entry] * n_scores))
        frames = [[wire.TokenDelta("r" * 20, [], prompt_logprobs=part)] for part in parts]
        assert sum(map(len, parts)) == n_scores
    else:
        frames = list(in_frames([wire.TokenDelta("r" * 20, [2**33], [entry] * n_scores or None, "length", 127)] * n_deltas))
        assert sum(map(len, frames)) == n_deltas
    assert max(len(wire.encode(wire.Tokens(frame))) for frame in frames) < wire.MAX_FRAME_BYTES / 4
    assert len(frames) < 400
