"""Which calls may move or mix rows as the data says, so that what was measured on one batch need not hold for the next.

Where the examples lie is remembered between steps. That is sound for calls whose dependence between rows is the same for any
content: entry-wise functions, reductions along an axis, products that keep the batch apart. Indexing is not such a call
(sorting by length is the identity on one batch and a shuffle on the next), nor is a product with a matrix from the data (a
permutation, an adjacency). A call that is not known to be plain is taken for one that moves rows: then nothing is remembered
and every batch is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .equations import letters_of, operands_of
from .functions import is_mask, without_underscore
from .kinds import ALONG_DIM, ATTENTION, BY_INDEX, BY_WEIGHTS, INTO_PIECES, MATRICES, OF_PIECES, PRODUCTS, ROW_BY_ROW, SHIFTS, kind_of
from .marks import Marks


class _Pair(NamedTuple):
    """Lengths of axes of an operand that is repeated along axes of others."""

    shared: tuple[int, ...]  # that every operand has
    own: tuple[int, ...]
    missing: tuple[int, ...]
    covered: bool  # some operand has every axis, and all have the first

    def meets_others(self, batch: int) -> bool:
        """Whether each of its examples may have met every example of another operand: they lie along different axes."""
        if not any(holds(length, batch) for length in self.missing) or not any(holds(length, batch) for length in self.own):
            return False
        if self.covered and self.shared[:1] == (batch,):
            return False
        return batch not in self.shared or batch in self.missing


@dataclass
class Moves:
    """What may depend on content, as lengths of axes: it matters if they may hold the examples, which only the losses tell."""

    unknown: set[str] = field(default_factory=set)  # calls nobody vouched for
    lengths: set[int] = field(default_factory=set)  # axes indexed by something that varies
    axes: set[tuple[int, int, torch.Size]] = field(default_factory=set)  # (axis, length, those before it): other axes are kept apart
    pieces: set[int] = field(default_factory=set)  # how many tensors were joined
    contracted: set[tuple[int, int]] = field(default_factory=set)  # (product of the axes kept apart, length of the axis added over)
    paired: set[_Pair] = field(default_factory=set)  # operands that are repeated along axes of others
    dormant: set[str] = field(default_factory=set)  # calls that join rows, to which no gradient came
    exactly: set[int] = field(default_factory=set)  # axes that matter if they are as long as the batch, no matter how long else

    def may_move_rows(self, batch: int, row_axes: Iterable[int]) -> bool:
        """Whether examples lying along `row_axes` at the taps may have been moved or mixed as the data said."""
        along = set(row_axes)
        return (
            bool(self.unknown or self.dormant)
            or any(holds(length, batch) for length in (*self.lengths, *self.pieces))
            or any(holds(n, batch) and (axis in along or not any(holds(b, batch) for b in before)) for axis, n, before in self.axes)
            or any(holds(length, batch) and not holds(apart, batch) for apart, length in self.contracted)
            or batch in self.exactly
            or any(pair.meets_others(batch) for pair in self.paired)
        )

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks, result: Any) -> None:
        """A call on example data."""
        kind = kind_of(name)
        if kind == "entrywise":
            if len(args) + len(kwargs) > 1:
                self._note_broadcast([value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)], marks)
        elif kind == "repeats":
            source = next((value for value in args[:1] if isinstance(value, Tensor)), None)
            if isinstance(result, Tensor) and source is not None:
                self._note_broadcast([source, result], marks)
                if _varies(source, marks):
                    shape = (*(1,) * (result.dim() - source.dim()), *source.shape)
                    self.exactly.update(size for size, before in zip(result.shape[1:], shape[1:]) if size != before)
        elif kind != "plain":
            self._note_other(name, args, kwargs, marks)

    def _note_other(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks) -> None:
        plain = without_underscore(name)
        if plain in ATTENTION:
            self._note_attention(args, kwargs)
        elif plain in BY_INDEX:
            if _fills_by_mask(args, marks):
                self.exactly.update(args[1].shape[1:])
                return
            self._note_index(args[0], args[1] if len(args) > 1 else None, marks)
            if len(args) > 2 and isinstance(args[2], Tensor):
                self._note_written(args[0], args[1], args[2], marks)
        elif plain in BY_WEIGHTS:
            weights = [value for value in (*args[1:3], *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 1]
            if any(_varies(weight, marks) for weight in weights):
                self._note_sizes(*args[:1], *weights)
        elif plain in ("narrow", "narrow_copy"):
            if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
                self._note_sizes(*args[:1])
        elif plain == "embedding":
            self._note_lookup(args, marks)
        elif plain in ROW_BY_ROW | ALONG_DIM and args and isinstance(args[0], Tensor) and args[0].dim():
            axis = _dim(plain, args, kwargs) % args[0].dim()
            if plain in ROW_BY_ROW:
                self._note_axis(axis, args[0])
            elif any(marks.varies(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)):
                self.lengths.add(args[0].shape[axis])
        elif plain in INTO_PIECES:
            self._note_pieces(plain, args, kwargs)
        elif plain in SHIFTS:
            self._note_shift(plain, args, kwargs)
        elif plain in OF_PIECES:
            pieces = args[0] if args else kwargs.get("tensors", ())
            self.pieces.add(len(pieces) if isinstance(pieces, list | tuple) else 0)
        elif plain in PRODUCTS:
            self._note_product(plain, args, kwargs, marks)
        elif plain in MATRICES:
            self.lengths.update(size for value in (*args, *kwargs.values()) if isinstance(value, Tensor) for size in value.shape[-2:])
        else:
            self.unknown.add(name)

    def _note_broadcast(self, tensors: list[Tensor], marks: Marks) -> None:
        """An entry-wise function that repeats example data along a new first axis: l (N,) against a mask (U, N) groups by content; or that brings every row
        together with every other, along whatever axes."""
        if len(tensors) < 2 or (len(tensors) == 2 and tensors[0].shape == tensors[1].shape):
            return
        tensors = [tensor for tensor in tensors if tensor.dim()]
        if len(tensors) < 2:
            return
        widest = max(tensor.dim() for tensor in tensors)
        longest = max(tensor.shape[0] for tensor in tensors if tensor.dim() == widest)
        varying = [tensor for tensor in tensors if _varies(tensor, marks)]
        for tensor in varying:
            if tensor.dim() < widest or (tensor.shape[0] == 1 and longest > 1):
                self.lengths.update(tensor.shape[int(tensor.shape[0] == 1 and tensor.dim() > 1) :][:1])
        if len(varying) > 1:
            self._note_pairs([(*(1,) * (widest - tensor.dim()), *tensor.shape) for tensor in varying])

    def _note_pairs(self, shapes: list[tuple[int, ...]]) -> None:
        """Operands with as many axes each; one is repeated along an axis where it has length one."""
        whole = [max(sizes) for sizes in zip(*shapes)]
        lacking = {axis for shape in shapes for axis, size in enumerate(shape) if size == 1 < whole[axis]}
        shared = tuple([size for axis, size in enumerate(whole) if axis not in lacking])
        covered = 0 not in lacking and any(list(shape) == whole for shape in shapes)
        for shape in shapes:
            missing = tuple([whole[axis] for axis in lacking if shape[axis] == 1])
            if missing:
                self.paired.add(_Pair(shared, tuple([size for size in shape if size > 1]), missing, covered))

    def _note_sizes(self, *tensors: Tensor) -> None:
        """Nobody knows which of their axes hold examples."""
        self.lengths.update(size for tensor in tensors for size in tensor.shape)

    def _note_written(self, target: Any, index: Any, value: Tensor, marks: Marks) -> None:
        """z[:] = g repeats g where it is shorter than what it is written to."""
        if isinstance(target, Tensor) and value.dim() and _varies(value, marks):
            try:
                place = torch.empty(target.shape, device="meta")[index].shape
            except Exception:  # a mask, an index on another device: looked at as an index
                return
            given = (*(1,) * (len(place) - value.dim()), *value.shape)
            if len(given) == len(place) and given != tuple(place):
                self.lengths.update(value.shape)

    def _note_index(self, source: Any, index: Any, marks: Marks) -> None:
        """x[order], x[:, order], x[mask]. Several index tensors go together: a fixed one as long as the batch holds the rows in place."""
        if not isinstance(source, Tensor):
            return
        items = index if isinstance(index, tuple) else (index,)
        used = sum(item.dim() if is_mask(item) else 1 for item in items if item is not None and item is not Ellipsis)
        axis = 0
        found: list[int] = []
        fixed: list[int] = []
        for item in items:
            if item is Ellipsis:
                axis += source.dim() - used
                continue
            if item is None:
                continue
            width = item.dim() if is_mask(item) else 1
            by_data = isinstance(item, slice) and any(isinstance(bound, Tensor) for bound in (item.start, item.stop, item.step))
            plain = (isinstance(item, int | slice) and not by_data) or (isinstance(item, Tensor) and not item.dim())
            if not plain:  # a list, an array of numpy's, a range: seen by nobody
                varies = not isinstance(item, Tensor) or marks.varies(item)
                (found if varies else fixed).extend(source.shape[axis : axis + width])
            axis += width
        if not any(length in fixed for length in source.shape[:1]):
            self.lengths.update(found)

    def _note_lookup(self, args: tuple[Any, ...], marks: Marks) -> None:
        """A table that is example data itself: a look-up is an index."""
        self.lengths.update(
            value.shape[0] for value in args if isinstance(value, Tensor) and value.is_floating_point() and marks.varies(value)
        )

    def _note_pieces(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """x.unbind(0), x.split(1): what Python does with the pieces, in which order it joins them, is not seen."""
        source = args[0] if args else next(iter(kwargs.values()))
        place = {"unbind": 1, "vsplit": 9, "hsplit": 9, "dsplit": 9}.get(name, 2)
        default = {"hsplit": 1, "dsplit": 2}.get(name, 0)
        axis = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
        if isinstance(source, Tensor) and source.dim() and isinstance(axis, int):
            self._note_axis(axis, source)

    def _note_axis(self, axis: int, source: Tensor) -> None:
        """It holds rows where it does so at the taps, or where none before it does (they were turned around)."""
        axis %= source.dim()
        self.axes.add((axis, source.shape[axis], source.shape[:axis]))

    def _note_shift(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(source, Tensor):
            return
        rest = args[2:3] if name in ("roll", "rot90") else args[1:]
        given = kwargs.get("dims", rest[0] if len(rest) == 1 else rest)
        dims = {"fliplr": (1,), "flipud": (0,)}.get(name, (given,) if isinstance(given, int) else tuple(given or ()))
        for axis in dims or ((0, 1) if name == "rot90" else range(source.dim())):
            if -source.dim() <= axis < source.dim():
                self._note_axis(axis, source)

    def _note_product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks) -> None:
        """A product of two tensors from the data, which may be a permutation of rows."""
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        operands += [item for value in args if isinstance(value, list | tuple) for item in value if isinstance(item, Tensor)]
        if sum(_varies(tensor, marks) for tensor in operands) < 2:
            return
        if name == "einsum" and isinstance(args[0], str):
            self._note_equation(args[0], operands_of(args))
            return
        if name in ("einsum", "tensordot", "inner", "addbmm", "vdot", "dot") or any(tensor.dim() < 3 for tensor in operands[-2:]):
            self._note_sizes(*operands)
            return
        a, b = operands[-2:]
        self.contracted.add((b.shape[:-2].numel(), b.shape[-2]))
        self.contracted.add((a.shape[:-2].numel(), a.shape[-1]))

    def _note_equation(self, equation: str, operands: list[Tensor]) -> None:
        """Letters that keep all operands apart, and those that some lack or that are added over."""
        terms, output = letters_of(equation, [operand.dim() for operand in operands])
        lengths: dict[str, int] = {}
        for term, operand in zip(terms, operands):
            for letter, size in zip(term, operand.shape):
                lengths[letter] = max(size, lengths.get(letter, 1))
        shared = tuple([lengths[letter] for letter in output if all(letter in term for term in terms)])
        for term in terms:
            missing = tuple([size for letter, size in lengths.items() if letter not in term])
            self.paired.add(_Pair(shared, tuple([lengths[letter] for letter in term]), missing, False))

    def _note_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[1] if len(args) > 1 else kwargs.get("key")
        if isinstance(key, Tensor):
            self.contracted.add((key.shape[:-2].numel(), key.shape[-2]))


def _fills_by_mask(args: tuple[Any, ...], marks: Marks) -> bool:
    """x[mask] = 0: an entry-wise choice, whatever the mask holds, as long as it lies over the first axes of x."""
    if len(args) != 3 or not is_mask(args[1]) or not args[1].dim() or args[1].shape != args[0].shape[: args[1].dim()]:
        return False
    value = args[2]
    return isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim() and not _varies(value, marks))


def _varies(tensor: Tensor, marks: Marks) -> bool:
    """Whether it holds another thing in every step; what carries gradient need not be looked up."""
    return tensor.requires_grad or marks.varies(tensor)


def holds(length: int, batch: int) -> bool:
    """Whether examples may lie along an axis so long."""
    return length >= batch and length % batch == 0


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    default = 0 if name == "msort" else -1
    place = 2 if name in ("topk", "take_along_dim", "kthvalue", "repeat_interleave") else 1
    given = kwargs.get("dim", args[place] if len(args) > place else default)
    return given if isinstance(given, int) and not isinstance(given, bool) else default
