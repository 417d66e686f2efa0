"""Work that a GPU has not done yet.

A backward pass runs every function on the stream that its forward pass ran on; what it leaves is read there, and on the caller's. Numbers that are
wanted on the host some time later are sent there without waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import WrongDraw

if TYPE_CHECKING:
    from .taps import Record

Receive = Callable[["Record", Tensor, tuple[Tensor, ...]], None]


def current_address(device: torch.device) -> int:
    """Of the stream that is current on this thread: streams themselves are costly to ask for. A CPU has but one."""
    address: int = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    return address


def check_not_recorded() -> None:
    """Refuse a step that somebody records as a CUDA graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise WrongDraw(
            "this step is being recorded as a CUDA graph: its replays would release one draw again and again, with one noise, and nobody would count them.",
            "step = private.compile(losses_of) records steps, with new noise and a count for each; or make it outside torch.cuda.graph.",
        )


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
    """The streams on which a backward pass hands something over.

    What is handed over on one may be read, and let go, on another: a weight may be used on both. So from the second stream of a device on, each hand-over
    comes after all that was started before it, and before all that follows.
    """

    def __init__(self) -> None:
        self._heard: dict[tuple[int | None, int], torch.cuda.Stream] = {}  # by device and address
        self._several: set[torch.device] = set()  # devices with more than one

    def noting(self, receive: Receive) -> Receive:
        """`receive`, with regard to the stream it is called on."""

        def noted(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
            if not grad.is_cuda:
                receive(record, grad, kept)
                return
            self._note(grad.device)
            self._wait(grad.device)
            receive(record, grad, kept)
            self._wait(grad.device)

        return noted

    def _note(self, device: torch.device) -> None:
        key = device.index, current_address(device)
        if key not in self._heard:
            if any(index == device.index for index, _ in self._heard):
                self._several.add(device)
            self._heard[key] = torch.cuda.current_stream(device)

    def _wait(self, device: torch.device) -> None:
        if device in self._several:
            torch.cuda.synchronize(device)

    def join(self) -> None:
        """What the caller's streams do from now on comes after all of it."""
        for stream in self._heard.values():
            here = torch.cuda.current_stream(stream.device)
            if here != stream:
                here.wait_stream(stream)


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
