from __future__ import annotations

import signal
import threading

import pytest

from twostroke.training.stop import StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_only_the_third_stops_at_once(number: signal.Signals) -> None:
    lines: list[str] = []
    with StopSignals(lines.append) as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert len(lines) == 2


def test_where_nothing_is_to_be_saved_the_first_stops_at_once() -> None:
    lines: list[str] = []
    with StopSignals(lines.append) as stop:
        stop.nothing_to_save = True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert lines == []


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in StopSignals.SIGNALS]
    with StopSignals(print):
        assert [signal.getsignal(number) for number in StopSignals.SIGNALS] != before
    assert [signal.getsignal(number) for number in StopSignals.SIGNALS] == before


def test_in_another_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def enter() -> None:
        with StopSignals(print) as stop:
            found.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(False, before)]
