"""What the tape must know of a torch function before it runs: whether it reads values, writes, makes something from nothing.

Everything is found by the function's name, once, and remembered. Torch functions reach the tape as builtins
(`torch.relu`), Python functions (`F.layer_norm`), Tensor methods (`Tensor.add_`) and attribute getters (`weight.T`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_VALUES_BEHIND_ATTRIBUTES = {"T", "mT", "H", "mH", "data", "real", "imag", "grad"}
_NOTHING_TO_SEE = set(
    """size stride dim ndimension numel nelement element_size is_contiguous storage_offset data_ptr is_floating_point
    is_complex is_signed get_device untyped_storage storage __len__ __repr__ __str__ __format__ item tolist __bool__
    __float__ __int__ __index__ __complex__ numpy __array__ __hash__ retain_grad requires_grad_ _is_view
    is_same_size is_pinned is_shared __contains__ __dir__ is_nonzero result_type can_cast promote_types broadcast_shapes
    get_default_dtype set_default_dtype device finfo iinfo manual_seed seed initial_seed set_rng_state get_rng_state""".split()
)
_BLANK = set(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_empty_strided arange zeros ones empty eye tril_indices triu_indices""".split()
)
_WITH_PAYLOAD = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "new_tensor"}
_BORROWS_ONLY_A_SHAPE = {"expand_as", "view_as", "reshape_as", "type_as", "to"}
_RUNS_BACKWARD = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_RANDOM = set(
    """rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson uniform_ normal_
    bernoulli_ exponential_ random_ geometric_ cauchy_ log_normal_ dropout""".split()
)
_TAKES_SIZES = set(
    """view reshape expand repeat tile unflatten broadcast_to zeros ones empty full rand randn randint randperm arange eye linspace
    new_zeros new_ones new_empty new_full resize_ interpolate one_hot repeat_interleave normal""".split()
)
_COPIES = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous"}
TAKES_MEMORY = {"data", "set_"}  # written to, a tensor lies where another does
OVERWRITES = {"copy_", "zero_", "fill_", "set_", "normal_", "uniform_", "data"}  # nothing is left of what their argument held before
_LOOKS_UP_ROWS = {"embedding", "index_select", "__getitem__"}


@dataclass(frozen=True, slots=True)
class Trait:
    """What a function does, as far as the tape cares."""

    name: str
    ignored: bool = False  # returns no values of its arguments
    writes: bool = False  # changes its first argument
    blank: bool = False  # the result depends on the arguments' shapes alone
    payload: bool = False  # the result holds numbers that came from outside
    borrows: bool = False  # reads only the shape or dtype of the second argument
    runs_backward: bool = False
    copies: bool = False  # the result is the argument in another precision or place
    looks_up: bool = False  # the result is rows of the argument
    random: bool = False  # draws random numbers
    takes_sizes: bool = False  # integers among the arguments may be sizes of the batch


TRAITS: dict[Callable[..., Any], Trait] = {}  # of functions that were met before


def trait_of(func: Callable[..., Any]) -> Trait:
    trait = TRAITS.get(func)
    if trait is None:
        trait = TRAITS[func] = _examine(func)
    return trait


def _examine(func: Callable[..., Any]) -> Trait:
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
        return Trait(
            attribute,
            ignored=attribute not in _VALUES_BEHIND_ATTRIBUTES,
            writes=name == "__set__",
        )
    in_place = name.endswith("_") and not name.endswith("__")
    return Trait(
        name,
        ignored=name in _NOTHING_TO_SEE,
        writes=in_place or name == "__setitem__" or name in _IN_PLACE_OPERATORS,
        blank=name in _BLANK,
        payload=name in _WITH_PAYLOAD,
        borrows=name in _BORROWS_ONLY_A_SHAPE,
        runs_backward=func in _RUNS_BACKWARD,
        copies=name in _COPIES,
        looks_up=name in _LOOKS_UP_ROWS,
        random=name in _RANDOM,
        takes_sizes=name in _TAKES_SIZES,
    )


_IN_PLACE_OPERATORS = {
    f"__i{op}__"
    for op in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
}


def written_by(trait: Trait, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a call changes: its first argument, `out`, or nothing."""
    if not trait.writes:
        return kwargs.get("out")
    return args[0] if args else next(iter(kwargs.values()))


def without_underscore(name: str) -> str:
    """`add` for `add_`, which does the same in place; `__add__` stays."""
    return name if name.startswith("_") else name.rstrip("_")


def is_mask(item: Any) -> bool:
    """Whether it picks by yes and no where it stands among the indices of a tensor."""
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)


def full_name(func: Callable[..., Any]) -> str:
    """A name a user can type: torch.lerp, torch.nn.functional.layer_norm, torch.Tensor.add."""
    name = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__"):
        return f"torch.Tensor.{trait_of(func).name}"
    if isinstance(func, types.MethodDescriptorType | types.WrapperDescriptorType):
        return f"torch.Tensor.{name}"
    if getattr(torch, name, None) is func:
        return f"torch.{name}"
    if getattr(torch.nn.functional, name, None) is func:
        return f"torch.nn.functional.{name}"
    if getattr(torch.Tensor, name, None) is func:
        return f"torch.Tensor.{name}"
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module else f"torch.{name}"


def _false(*_: Any) -> bool:
    return False


_QUESTIONS = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
_opened: dict[types.FunctionType, types.FunctionType] = {}


def is_open(func: Callable[..., Any]) -> bool:
    """Whether `func` is written in Python on top of other torch functions, so that the tape can watch those instead."""
    return (
        isinstance(func, types.FunctionType)
        and func.__module__ in ("torch.nn.functional", "torch.functional")
        and not _QUESTIONS.isdisjoint(func.__code__.co_names)
    )


def opened(func: Callable[..., Any]) -> types.FunctionType:
    """`func` without its own hand-over to the tape: called under the tape, its inner torch functions are seen.

    Python functions of torch begin with `if has_torch_function(...): return handle_torch_function(func, ...)`; the copy
    runs the same code in a namespace where that question is answered no.
    """
    assert isinstance(func, types.FunctionType)
    copy = _opened.get(func)
    if copy is None:
        namespace = {**func.__globals__, **dict.fromkeys(_QUESTIONS, _false)}
        copy = types.FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
        copy.__kwdefaults__ = func.__kwdefaults__
        _opened[func] = copy
    return copy
