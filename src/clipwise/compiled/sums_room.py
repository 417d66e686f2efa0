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
    """For the sums of these parameters. Programs lend what they leave here (lending.py); whoever is about to write here takes it back first."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.places = room_for_sums(parameters)
        self.lending = Lending()
        for number, parameter in enumerate(parameters):
            _rooms.put(parameter, (weakref.ref(self), number))


_rooms: WeakTable[tuple[weakref.ref[SumsRoom], int]] = WeakTable()  # by parameter: the last that was made for it


def place_for(parameter: Tensor | None, total: Tensor) -> tuple[SumsRoom, Tensor] | None:
    """Where an update wants the sum of this parameter, if there is one that does and it is a tensor like `total`."""
    found = None if parameter is None else _rooms.get(parameter)
    room = None if found is None else found[0]()
    if found is None or room is None:
        return None
    place = room.places[found[1]]
    is_like = (place.shape, place.dtype, place.device) == (total.shape, total.dtype, total.device)
    return (room, place.detach()) if is_like else None
