"""Where a recorded update reads the clipped sums of its parameters. A program leaves them there at once: of a large model they take much room, and
need it once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from ..noise import room_for_sums
from ..weak import WeakTable
from .lending import Lending


class SumsRoom:
    """For the sums of these parameters. It is written to by programs, which lend what they leave here (lending.py), and by the update."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.places = room_for_sums(parameters)
        self._lendings: set[Lending] = set()
        for number, parameter in enumerate(parameters):
            _rooms.put(parameter, (weakref.ref(self), number))

    def make_way(self, *, but: Sequence[Tensor] = ()) -> None:
        """Somebody is about to write here: what others hold of what lies here moves to memory of its own. `but`: sums that are used up by that."""
        for lending in self._lendings:
            lending.take_back(but={id(total) for total in but})

    def place(self, number: int, lending: Lending) -> Tensor:
        """For somebody who will leave a sum here, and lend it."""
        self._lendings.add(lending)
        return self.places[number].detach()


_rooms: WeakTable[tuple[weakref.ref[SumsRoom], int]] = WeakTable()  # by parameter: the last that was made for it


def place_for(parameter: Tensor | None, total: Tensor, lending: Lending) -> tuple[SumsRoom, Tensor] | None:
    """Where an update wants the sum of this parameter, if there is one that does and it is a tensor like `total`."""
    found = None if parameter is None else _rooms.get(parameter)
    room = None if found is None else found[0]()
    if found is None or room is None:
        return None
    there = room.places[found[1]]
    is_like = (there.shape, there.dtype, there.device) == (total.shape, total.dtype, total.device)
    return (room, room.place(found[1], lending)) if is_like else None
