"""Measures the parts of a step without waiting for the device after each."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Adds the time since the last lap to a named part of the step.

    On a CPU a lap reads the clock. On a GPU work is queued, so a lap records an event, and ``finish`` reads all events after
    one synchronisation. Parts are then times on the device, which include gaps in which it waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._device = device
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._parts: dict[str, float] = {}
        if self._uses_events:
            self._record("")
        self._began = self._last = time.perf_counter()

    def _record(self, part: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append((part, event))

    def lap(self, part: str) -> None:
        """Count the time since the last lap as ``part``."""
        if self._uses_events:
            self._record(part)
            return
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def finish(self) -> tuple[float, dict[str, float]]:
        """Seconds since ``start`` by the wall clock, and the seconds of each part."""
        if self._uses_events:
            torch.cuda.synchronize(self._device)
            for (_, before), (part, after) in zip(self._events, self._events[1:], strict=False):
                self._parts[part] = self._parts.get(part, 0.0) + before.elapsed_time(after) / 1e3
        return time.perf_counter() - self._began, self._parts
