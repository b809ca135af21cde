"""What the decoder asks of a device: memory, two streams, events, and work put on a stream in order.

CpuDevice    everything happens at once; host memory is device memory
CudaDevice   pinned memory, a side stream, events
A simulated device with the same methods is in `gd_plugin.testing`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gd_plugin.errors import GuidedDecodingError

__all__ = ["CpuDevice", "CudaDevice", "MaskDevice", "open_device"]


class MaskDevice(Protocol):
    """A device with a main stream, where the engine runs, and a side stream for the masks.

    Streams and events are opaque handles of the implementation.

    Attributes:
        device: where `empty` allocates.
        shares_memory: host buffers are device buffers: nothing is ever copied.
        side: the side stream.
    """

    device: torch.device
    shares_memory: bool
    side: Any

    def main(self) -> Any:
        """Return the stream the caller works on now."""

    def empty_host(self, size: int) -> torch.Tensor:
        """Return zeroed int32 [size] on the host, page-locked if the device can copy from it asynchronously."""

    def empty(self, size: int) -> torch.Tensor:
        """Return zeroed int32 [size] on the device."""

    def event(self) -> Any:
        """Return a new event."""

    def record(self, event: Any, stream: Any) -> None:
        """Record `event` behind what `stream` has been given so far."""

    def wait(self, event: Any, stream: Any) -> None:
        """Hold `stream` until `event`; an event that was never recorded holds nothing."""

    def synchronize(self, event: Any) -> None:
        """Hold the calling thread until `event`, without the interpreter lock."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Put a copy on `stream`; it reads `source` when it runs, not now."""

    def launch(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Put the kernels that `function` launches on `stream`; a simulated device checks the order of what they touch."""

    def is_capturing(self) -> bool:
        """Tell whether the calling thread is capturing a graph."""


class CpuDevice:
    """The CPU: one thread of work, so every order holds by itself."""

    shares_memory = True
    side = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def main(self) -> Any:
        """See `MaskDevice.main`."""
        return None

    def empty_host(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty_host`."""
        # kept out of inference mode, whose tensors other threads may not write
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=torch.int32)

    def empty(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty`."""
        # kept out of inference mode, whose tensors other threads may not write
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=torch.int32)

    def event(self) -> Any:
        """See `MaskDevice.event`."""
        return None

    def record(self, event: Any, stream: Any) -> None:
        """See `MaskDevice.record`."""

    def wait(self, event: Any, stream: Any) -> None:
        """See `MaskDevice.wait`."""

    def synchronize(self, event: Any) -> None:
        """See `MaskDevice.synchronize`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """See `MaskDevice.copy`."""
        target.copy_(source)

    def launch(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """See `MaskDevice.launch`."""
        function()

    def is_capturing(self) -> bool:
        """See `MaskDevice.is_capturing`."""
        return False


class CudaDevice:
    """A CUDA device. Nothing here synchronises but `synchronize`."""

    shares_memory = False

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.side = torch.cuda.Stream(self.device)
        self._pin_memory = pin_memory

    def main(self) -> torch.cuda.Stream:
        """See `MaskDevice.main`."""
        return torch.cuda.current_stream(self.device)

    def empty_host(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty_host`."""
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=torch.int32, pin_memory=self._pin_memory)

    def empty(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty`."""
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=torch.int32, device=self.device)

    def event(self) -> torch.cuda.Event:
        """See `MaskDevice.event`."""
        return torch.cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        """See `MaskDevice.record`."""
        event.record(stream)

    def wait(self, event: Any, stream: Any) -> None:
        """See `MaskDevice.wait`."""
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        """See `MaskDevice.synchronize`."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """See `MaskDevice.copy`."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def launch(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """See `MaskDevice.launch`."""
        with torch.cuda.stream(stream):
            function()

    def is_capturing(self) -> bool:
        """See `MaskDevice.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()


def open_device(device: "torch.device | str | MaskDevice | None", pin_memory: bool | None) -> MaskDevice:
    """Return the device to keep rows on.

    Args:
        device: a torch device, an object with the methods of `MaskDevice`, or None for the current CUDA device if
            there is one and the CPU otherwise.
        pin_memory: page-lock host rows; None does on CUDA. The CPU never does.

    Raises:
        ValueError: neither the CPU nor CUDA.
        GuidedDecodingError: CUDA without a CUDA device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, torch.device | str):
        return device
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise GuidedDecodingError(
                f"device {str(device)!r} was asked for, but torch finds no CUDA device here; use device='cpu', or check "
                "the driver with nvidia-smi"
            )
        return CudaDevice(device, pin_memory is not False)
    if device.type == "cpu":
        return CpuDevice()
    raise ValueError(f"masks can be kept on the CPU or on CUDA, got device {str(device)!r}")
