"""StepClock: how long the parts of one call of a processor take.

In:  laps.      Out: seconds a part. On a GPU the parts that run there are timed by events, read when somebody asks.
"""

import time
from typing import Any

import torch

__all__ = ["StepClock"]


class StepClock:
    """Times the parts of one call.

    Args:
        device: where the scores are.

    Attributes:
        start: `time.perf_counter()` at the call's start.
        end: the same at its end, once `stop` has been called.
    """

    def __init__(self, device: torch.device) -> None:
        self.start = self.end = self._last = time.perf_counter()
        self._on_gpu = device.type == "cuda"
        # nothing is copied where masks and logits share their memory
        self._seconds: dict[str, float] = {} if self._on_gpu else {"copy": 0.0}
        self._events: list[tuple[str, Any, Any]] = []
        self._last_event: Any = None

    def lap(self, part: str) -> None:
        """Count the host's time since the last lap as this part's."""
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    def device_lap(self, part: str | None) -> None:
        """Count the device's time since the last device lap as this part's; None begins. On a CPU, as `lap`."""
        if not self._on_gpu:
            if part is not None:
                self.lap(part)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if part is not None and self._last_event is not None:
            self._events.append((part, self._last_event, event))
        self._last_event = event
        # the host's own time for it is launching, which nobody waits for
        self._last = time.perf_counter()

    def stop(self) -> None:
        """End the call."""
        self.end = time.perf_counter()

    def seconds(self, part: str) -> float | None:
        """Return the seconds of a part, or None if it had no lap. Waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds.get(part)
