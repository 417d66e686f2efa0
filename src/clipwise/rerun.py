"""Does a row of the model's output stay the same when other rows are taken away?

Mixing that leaves no gradient path (detached batch statistics, routing by rank in the batch, division by a batch count)
shows in no backward pass. So the captured module is run twice more, once on the whole batch and once on some of the
examples, with every random draw held still and its buffers put back afterwards.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import MixedExamples
from .functions import is_open, opened
from .layout import EvenGrouping, Layout, Table
from .marks import is_declared_constant
from .tape import RootCall, Tape, outputs_in

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_FILLS = {"rand": 0.5, "uniform_": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0, "normal": 0.0, "normal_": 0.0}
_FILLS |= {"exponential_": 1.0, "bernoulli_": 1.0, "log_normal_": 1.0, "cauchy_": 0.0, "geometric_": 1.0, "random_": 0.0}
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.feature_dropout}


class Still(TorchFunctionMode):
    """Random functions give the same for every row: dropout keeps everything, a draw is a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            return func(*args[:4], **{**dict(zip(("dropout_p", "is_causal"), args[4:])), **kwargs, "dropout_p": 0.0})
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "training": False}
        if name in ("bernoulli",):
            return (args[0] >= 0.5).to(args[0].dtype)
        if name in _FILLS:
            return func(*args, **kwargs).fill_(_FILLS[name])
        if name in ("randint", "randint_like"):
            return torch.zeros_like(func(*args, **kwargs))
        if name == "randperm":
            return torch.arange(args[0], device=kwargs.get("device"))
        if is_open(func):
            with self:
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)


def check_rows_alone(tape: Tape, batch: int, nodes: set[Any], placements: Iterable[Layout | Table | None]) -> None:
    """Refuse if some output the losses use changes in a row when other examples leave."""
    layouts = [placement for placement in placements if isinstance(placement, Layout)]
    axis = max((layout.axes[0] for layout in layouts), key=[layout.axes[0] for layout in layouts].count, default=0)
    order = next((layout.order for layout in layouts), "block")
    examples = sorted(random.Random().sample(range(batch), (batch + 1) // 2))
    for call in tape.root_calls[-2:]:
        if any(node is not None and node in nodes for node in call.output_nodes):
            with tape.pause(), tape.eagerly(), _undisturbed(tape.modules):
                _check_call(call, batch, axis, order, examples, nodes)


def _check_call(call: RootCall, batch: int, axis: int, order: str, examples: list[int], nodes: set[Any]) -> None:
    axes = _batch_axes(call, batch, axis)
    if not axes:
        return
    whole = _outputs(call, {})
    error: Exception | None = None
    for way in _ways(axes):
        try:
            part = _outputs(call, {key: (where, _rows(size, batch, order, examples)) for key, (where, size) in way.items()})
        except Exception as raised:  # the model cannot run on fewer rows
            error = raised
            continue
        if all(_same_rows(a, b, batch, order, examples) for a, b, node in zip(whole, part, call.output_nodes) if node in nodes):
            return
        error = None
    name = type(call.module).__name__
    if error is not None:
        raise MixedExamples(
            f"{name} cannot be run on {len(examples)} of {batch} examples, so it cannot be shown that examples do not mix "
            f"({type(error).__name__}: {error}).",
            "Let the model accept batches of any size; declare inputs that carry no examples with clipwise.constant(x).",
        ) from error
    raise MixedExamples(
        f"a row of {name}'s output changes when other examples are taken out of the batch: examples mix in the forward pass.",
        "Remove statistics, ranks or counts over the batch from the model; declare inputs that carry no examples with clipwise.constant(x).",
    )


def _batch_axes(call: RootCall, batch: int, preferred: int) -> dict[int, tuple[int, int]]:
    """{id of an input: (its batch axis, its length)}; exactly one row an example if any input has that, else a multiple."""
    tensors = [tensor for tensor in _inputs(call) if tensor.dim() and not is_declared_constant(tensor)]
    for fits in (lambda size: size == batch, lambda size: size % batch == 0):
        found = {}
        for tensor in tensors:
            axis = next((a for a in (preferred, 0, 1) if a < tensor.dim() and tensor.shape[a] and fits(tensor.shape[a])), None)
            if axis is not None:
                found[id(tensor)] = (axis, tensor.shape[axis])
        if found:
            return found
    return {}


def _ways(axes: dict[int, tuple[int, int]]) -> Iterator[dict[int, tuple[int, int]]]:
    """As found; if that fails, the same without inputs that share their length by chance (all but the first)."""
    yield axes
    if len(axes) > 1:
        first = next(iter(axes))
        yield {first: axes[first]}


def _inputs(call: RootCall) -> list[Tensor]:
    return outputs_in([call.args, call.kwargs])


def _rows(size: int, batch: int, order: str, examples: Sequence[int]) -> Tensor:
    """The rows of some examples."""
    owners = EvenGrouping(size, batch, order if size > batch else "block").owners()
    return torch.nonzero(torch.isin(owners, torch.tensor(examples)))[:, 0]


def _outputs(call: RootCall, selection: dict[int, tuple[int, Tensor]]) -> list[Tensor]:
    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in selection:
                axis, rows = selection[id(value)]
                return value.index_select(axis, rows.to(value.device))
            return value.clone()
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(pick, value))
        if isinstance(value, list | tuple):
            return type(value)(map(pick, value))
        return {k: pick(v) for k, v in value.items()} if isinstance(value, dict) else value

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    with Still():
        return outputs_in(call.module(*pick(tuple(call.args)), **pick(dict(call.kwargs))))


def _same_rows(whole: Tensor, part: Tensor, batch: int, order: str, examples: list[int]) -> bool:
    """Whether `part` is `whole` with some rows left out along one axis. An output without rows says nothing."""
    differing = [axis for axis in range(whole.dim()) if part.dim() == whole.dim() and whole.shape[axis] != part.shape[axis]]
    if part.shape == whole.shape or not whole.is_floating_point():
        return True
    if len(differing) != 1 or whole.shape[differing[0]] % batch:
        return False
    (axis,) = differing
    rows = _rows(whole.shape[axis], batch, order, examples).to(whole.device)
    if len(rows) != part.shape[axis]:
        return False
    expected = whole.index_select(axis, rows).double()
    error = (part.double() - expected).abs()
    size = expected.abs().nan_to_num(0, 0, 0)
    finite = error.isfinite()
    scale = size.amax() if size.numel() else size.new_zeros(())
    return bool((~finite | (error <= TOLERANCE[whole.dtype] * scale)).all())


@contextlib.contextmanager
def _undisturbed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The block works on copies of the buffers, and random states are afterwards what they were before."""
    holders = [module for root in modules for module in root.modules()]
    buffers = [(module, dict(module._buffers)) for module in holders]
    copies: dict[int, Tensor] = {}
    for module, held in buffers:
        for name, buffer in held.items():
            module._buffers[name] = None if buffer is None else copies.setdefault(id(buffer), buffer.clone())
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)
