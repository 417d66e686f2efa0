"""Work that a GPU has not done yet.

A backward pass runs every function on the stream that its forward pass ran on; what it leaves is read on the caller's. Numbers that are
wanted on the host some time later are sent there without waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .taps import Record

Receive = Callable[[Record, Tensor, tuple[Tensor, ...]], None]


def current_address(device: torch.device) -> int:
    """Of the stream that is current on this thread: streams themselves are costly to ask for. A CPU has but one."""
    address: int = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    return address


@contextlib.contextmanager
def on_this_thread() -> Iterator[None]:
    """A backward pass inside this block runs on the caller's thread, on a GPU too: to hand a small network's over to autograd's and back takes longer than
    many of its kernels.

    If it fails, functions that were due would wait on this thread for the next pass, and with them all that they have saved: of a step that ran out of
    memory, most of the memory. One over nothing takes them away.
    """
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    except BaseException:
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunction():
            number = torch.zeros((), requires_grad=True)
            torch.autograd.grad(number * 1, number)
        raise


class Streams:
    """The streams on which something was handed over."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int | None, int], torch.cuda.Stream] = {}  # by device and address

    def noting(self, receive: Receive) -> Receive:
        """`receive`, and the stream it was called on is noted."""

        def noted(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
            receive(record, grad, kept)
            self.note(grad)

        return noted

    def note(self, tensor: Tensor) -> None:
        """This tensor was made on the stream that is current now, on this thread."""
        if tensor.is_cuda:
            key = tensor.device.index, current_address(tensor.device)
            if key not in self._heard:
                self._heard[key] = torch.cuda.current_stream(tensor.device)

    def join(self) -> None:
        """What the caller's streams do from now on comes after all of it."""
        for stream in self._heard.values():
            here = torch.cuda.current_stream(stream.device)
            if here != stream:
                here.wait_stream(stream)


class OneByOne:
    """Blocks that read what blocks before them have made: one on another stream than the first waits for these, and those after it for it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._first: int | None = None
        self._is_elsewhere = False

    def __enter__(self) -> None:
        stream = current_address(self._device)
        self._first = stream if self._first is None else self._first
        self._is_elsewhere = stream != self._first
        self._wait()

    def __exit__(self, *_: object) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._is_elsewhere:
            torch.cuda.synchronize(self._device)


class OnTheWay:
    """A few numbers that are on their way to the host."""

    def __init__(self, numbers: Sequence[Tensor] = ()):
        """`numbers` have no axes."""
        self._there: list[Tensor] = []
        self._arrived: list[torch.cuda.Event] = []
        for device in {number.device for number in numbers}:
            mine = [number.detach().float() for number in numbers if number.device == device]
            together = torch.stack(mine) if len(mine) > 1 or device.type == "cpu" else mine[0].view(1)  # of its own, or soon
            self._there.append(together.to("cpu", non_blocking=True))
            if device.type == "cuda":
                self._arrived.append(torch.cuda.current_stream(device).record_event())

    def numbers(self) -> list[float]:
        """Waits until they have arrived."""
        for event in self._arrived:
            event.synchronize()
        return [number for together in self._there for number in together.tolist()]
