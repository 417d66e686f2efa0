"""A stage of a program (stages.py) as a CUDA graph that reads its inputs where they lie.

A training that makes the same step again and again finds its large tensors at the same addresses, for torch's allocator is asked for the
same in the same order. So nothing needs to be copied to where a graph reads it: the addresses are looked at, and where one is not what it
was, the stage runs as always. Small tensors, and those that move about in spite of all (a batch that was just loaded), are copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..streams import current_address
from ..tracing import NotTraceable
from .agreement import repeats
from .leaving import SMALL_RESULT, Leave, Left, Run
from .lending import Lending
from .recording import Pool, alike, recorded_in_passing

_SMALL = 2**20  # bytes; torch looks for room for such tensors wherever there is some
_OFTEN = 2  # a large tensor that has moved so many times is copied
_ATTEMPTS = 8  # at recording one stage that is hardly used: addresses may change again and again
_WORTH_IT = 100  # replays
_LEAST_ROOM = 2**26  # bytes
_SHARE = 32  # of the most that the training has held so far …
_SHARE_AT_THE_END = 8
_SHARE_OF_FREE = 8  # … and of what is free


class Room:
    """Where the recordings of one program may be replayed, and how much memory they may keep beside what they hand over at the end.

    Each has memory of its own: what one leaves there, another that runs before or after it does not touch. But all are recorded on one stream,
    for which libraries have one workspace; so all are replayed on one, that of the first.
    """

    def __init__(self, device: torch.device, precision: torch.dtype):
        self.device = device
        self.precision = precision
        self.taken = 0
        self.is_closed = False  # a recording failed
        self._stream: int | None = None

    def is_here(self) -> bool:
        stream = current_address(self.device)
        self._stream = stream if self._stream is None else self._stream
        return stream == self._stream and not self.is_closed

    def is_recorded_by_another(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def most(self, *, at_the_end: bool) -> int:
        """Bytes that all recordings may take; with the last stage, in which most of the work is done, more. Little beside what the training has held so
        far, and beside what is free: what they take, nobody else gets."""
        if self.device.type != "cuda":
            return _LEAST_ROOM
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.max_memory_allocated(self.device)
        return min(max(_LEAST_ROOM, held // (_SHARE_AT_THE_END if at_the_end else _SHARE)), (free + self.taken) // _SHARE_OF_FREE)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def pool(self) -> Pool:
        """For the recordings of one stage, one after the other."""
        return torch.cuda.graph_pool_handle() if self.device.type == "cuda" else (0, 0)


@dataclass(frozen=True)
class _Recording:
    replay: Callable[[], None]
    read: list[int]  # inputs that are read where they lie …
    places: list[int]  # … which is here
    copied: list[list[int]]  # the others, those of one type together, …
    copies: list[list[Tensor]]  # … are copied to these
    results: list[Tensor | _View]
    left: Left  # where they lie

    def fits(self, given: Sequence[Tensor]) -> bool:
        return [given[number].data_ptr() for number in self.read] == self.places

    def __call__(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What it finds is written over by the next call."""
        self.left.make_way()
        for copies, numbers in zip(self.copies, self.copied):
            torch._foreach_copy_(copies, [given[number] for number in numbers])
        self.replay()
        return tuple([result.of(given) if isinstance(result, _View) else result for result in self.results])


@dataclass(frozen=True)
class _View:
    """A result that lies in the memory of an input."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # behind the beginning of the input

    def of(self, given: Sequence[Tensor]) -> Tensor:
        source = given[self.number]
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)


class InPlace:
    """run(*tensors), which writes to none of them, replayed where that is possible.

    Results live until the next call; with `hands_over` they are lent (lending.py), and small ones tensors of their own. `leave` tells, of results
    like these, how they are left where somebody wants them.
    """

    def __init__(self, run: Run, room: Room, *, hands_over: bool, takes: int = 0, works_in: int = 0, leave: Leave | None = None):
        self._run, self._room, self._hands_over, self._leave = run, room, hands_over, leave
        # Bytes, at least: what is recorded and then found to take too much, torch keeps until somebody asks for more. With its results, and where these lie elsewhere.
        self._takes, self._works_in = takes, works_in
        self._lending = Lending()
        self._recording: _Recording | None = None
        self._places: list[int] = []  # of the inputs of the last run that was no replay
        self._moved: Counter[int] = Counter()  # how often in succession each of them lay somewhere else; those that do so often, for ever
        self._left = _ATTEMPTS
        self._used = 0  # how often the recording was replayed
        self._pool: Pool | None = None  # where one recording after the other lies
        self._before: Callable[[], None] | None = None  # the last graph there: without one torch gives the memory up
        self._in_pool = self._nbytes = 0  # bytes there, and with copies of inputs
        self._elsewhere = 0  # bytes of results that were left where somebody wanted them

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        if not self._room.is_here():
            if self._room.is_closed:
                self._give_up()
            return self._run(*given)
        if self._recording is not None and self._recording.fits(given):
            return self._replayed(self._recording, given)
        made = self._run(*given)
        if self._left:
            self._look(given, made)
        return made

    def forget(self) -> None:
        """What follows is recorded anew, and held against the stage anew."""
        self._drop()
        self._places = []
        if self._left and not self._room.is_closed:
            self._left = _ATTEMPTS
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Nothing is recorded any more; what was, takes no room."""
        self._drop()
        self._pool = self._before = None
        self._left = self._in_pool = 0
        self._count(0)

    def _replayed(self, recording: _Recording, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._used += 1
        if not self._hands_over:
            return recording(given)
        self._lending.take_back()
        found = dict(enumerate(recording(given)))
        large = [number for number, result in enumerate(recording.results) if isinstance(result, Tensor) and result.nbytes > SMALL_RESULT]
        small = [number for number in found if number not in large]
        for lending in dict.fromkeys(lent_by := [recording.left.lent_by.get(number, self._lending) for number in large]):
            mine = [number for number, other in zip(large, lent_by) if other is lending]
            found |= zip(mine, lending.lend([found[number] for number in mine]))
        found |= zip(small, _copies([found[number] for number in small]))
        return tuple(found.values())

    def _look(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Record the stage, once its large inputs lie where they lay before."""
        before, self._places = self._places, [tensor.data_ptr() for tensor in given]
        moved = {number for number, (then, now) in enumerate(zip(before, self._places)) if then != now and given[number].nbytes > _SMALL}
        for number in range(len(given)):
            if number in moved:
                self._moved[number] += 1
            elif self._moved[number] < _OFTEN:
                self._moved[number] = 0
        if not before or any(self._moved[number] < _OFTEN for number in moved) or self._room.is_recorded_by_another():
            return
        self._left = (_ATTEMPTS if self._used >= _WORTH_IT else self._left) - 1
        self._drop()
        try:
            self._recording = self._recorded(given, made)
        except Exception:  # the stages run as always: recordings only save time
            self._room.is_closed = True
        if self._recording is None:
            self._give_up()
        else:
            self._before = self._recording.replay

    def _recorded(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> _Recording | None:
        """None: it would take too much room."""
        room = self._room
        copied = {number for number, tensor in enumerate(given) if tensor.nbytes <= _SMALL or self._moved[number] >= _OFTEN}
        copies_take = sum(given[number].nbytes for number in copied)
        most = room.most(at_the_end=self._hands_over)
        left = Left(self._run) if self._leave is None else self._leave(made)
        if left.nbytes != self._elsewhere:  # what was left in the pool before would lie there for nothing
            self._pool, self._before, self._in_pool, self._elsewhere = None, None, 0, left.nbytes
        handed_over = sum(tensor.nbytes for tensor in made) if self._hands_over else 0
        self._count(copies_take)
        needed = self._works_in if left.lent_by else self._takes - handed_over
        if room.taken + max(needed - self._in_pool, 0) > most:
            return None
        results = handed_over - left.nbytes if self._pool is None else 0  # those that will lie in the pool
        inputs = [tensor.clone() if number in copied else tensor for number, tensor in enumerate(given)]
        before = room.reserved()
        self._pool = self._pool or room.pool()
        left.make_way()
        replay, found = recorded_in_passing(left.run, inputs, room.device, self._pool)
        self._in_pool += max(room.reserved() - before - results, 0)
        self._count(copies_take)
        if room.taken > most:
            return None
        read = [number for number in range(len(given)) if number not in copied]
        places = [given[number].data_ptr() for number in read]
        together = alike({number: given[number].dtype for number in copied})
        copies = [[inputs[number] for number in numbers] for numbers in together]
        recording = _Recording(replay, read, places, together, copies, [_result(tensor, inputs, given) for tensor in found], left)
        del found  # what lies in the memory of an input would hold it
        if not all(repeats(mine, other, room.precision) for mine, other in zip(recording(given), made, strict=True)):
            raise ArithmeticError("a replay finds something else than the stage that was recorded.")
        return recording

    def _count(self, copies: int) -> None:
        """What this stage takes of the room, from now on."""
        self._room.taken += self._in_pool + copies - self._nbytes
        self._nbytes = self._in_pool + copies

    def _drop(self) -> None:
        if self._recording is not None and self._room.device.type == "cuda":
            torch.cuda.synchronize(self._room.device)  # it may be running
        self._recording, self._used = None, 0


def _result(tensor: Tensor, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor | _View:
    """What lies in the memory of an input, or of its copy, is a view of what is given: later stages may write to it."""
    place = tensor.untyped_storage().data_ptr()
    for number, mine in enumerate(inputs):
        if mine.untyped_storage().data_ptr() == place:
            if mine.stride() != given[number].stride():
                raise NotTraceable("a view of a tensor that is laid out otherwise.")
            return _View(number, tensor.shape, tensor.stride(), int(tensor.storage_offset() - mine.storage_offset()))
    return tensor


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Those of one type together."""
    alike = [number for number, tensor in enumerate(tensors) if tensor.dtype == tensors[0].dtype and tensor.is_floating_point()]
    together = dict(zip(alike, torch._foreach_add([tensors[number] for number in alike], 0.0) if alike else ()))
    return tuple([together[number] if number in together else tensor.clone() for number, tensor in enumerate(tensors)])
