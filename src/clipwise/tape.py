"""The tape: watches a model while it runs and remembers, inside the autograd graph, every call that uses a parameter."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConsumedTape
from .head import HeadCall
from .layout import Layout
from .marks import Marks, tensors_in
from .moving import Moves
from .taps import Record, Switch
from .watch import Watch

Receive = Callable[[Record, Tensor, tuple[Tensor, ...]], None]


@dataclass
class Experience:
    """What was verified about a model: for each way the losses are computed, where the examples lie at each tap."""

    layouts: dict[int, dict[int, Layout]] = field(default_factory=dict)
    zeros: set[tuple[int, int]] = field(default_factory=set)  # taps whose gradient was zero for every single example


_experience: weakref.WeakKeyDictionary[nn.Module, Experience] = weakref.WeakKeyDictionary()


@dataclass
class RootCall:
    """A call of a captured module: what went in, and the graph nodes of the tensors that came out."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_nodes: list[Any] = field(default_factory=list)
    autocast_dtypes: dict[str, torch.dtype] = field(default_factory=lambda: _autocast_dtypes())

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision under which the call was made."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast_dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


def _autocast_dtypes() -> dict[str, torch.dtype]:
    return {device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}


class Tape:
    """Watches the calls of one or several modules. Made by `capture`; handed to `per_example_norms` and `clipped_loss`.

    Nothing is stored on modules or parameters; taps live in the autograd graph, so a forward pass whose losses are never
    used (an evaluation, a retry after an exception) leaves nothing behind.
    """

    def __init__(self, modules: Sequence[nn.Module], *, fallback: bool = False):
        self.modules = list(modules)
        self.marks = Marks(self.modules)
        self.fallback = fallback
        self.experience = _experience.setdefault(self.modules[0], Experience())
        self.anchor = torch.zeros((), requires_grad=True)
        self.switch = Switch()
        self.watch = Watch(self)
        self.trail = 0  # hash of the calls seen so far
        self.created: set[int] = set()  # keys of the taps made so far
        self.moves = Moves()  # rows that may have been moved as the data says
        self.needs_graph = False  # some weight is pulled back through autograd
        self.paused = False
        self.compiler_silenced = False
        self.root_calls: list[RootCall] = []
        self.head_calls: list[HeadCall] = []
        self.depth = 0  # captured modules that are running
        self.nonfinite: Tensor | None = None  # examples of the last losses whose gradient was not finite: private data
        self._entered = 0
        self._stack = contextlib.ExitStack()
        self._collected: tuple[weakref.ref[Tensor], Any] | None = None
        self._consumed: dict[int, weakref.ref[Tensor]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The tape is on inside this block, on this thread and on the threads autograd starts from it."""
        self._entered += 1
        outermost, was_paused = self._entered == 1, self.paused
        self.paused = False
        try:
            if outermost:
                if "torch._dynamo" in sys.modules:
                    self.silence_compiler()
                with self.watch:
                    yield
            else:
                yield
        finally:
            self._entered -= 1
            self.paused = was_paused
            if outermost:
                self._stack.close()
                self.compiler_silenced = False

    def silence_compiler(self) -> None:
        """Regions wrapped in torch.compile run eagerly while the tape is on: it can see eager calls only."""
        self.compiler_silenced = True
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        """Compiled regions run eagerly inside this block."""
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Our own arithmetic is none of the tape's business, nor of autograd's."""
        was_paused, self.paused = self.paused, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.paused = was_paused

    def backward(
        self, losses: Tensor, weights: Tensor, receive: Receive | None, *, inputs: Sequence[Tensor] = (), retain_graph: bool
    ) -> list[Tensor | None]:
        """One backward pass of Σ weights[i]·losses[i], with the taps handing over to `receive`; gradients of `inputs`, if any.

        The tape is on meanwhile: checkpointed regions are computed again and must meet the same taps.
        """
        self.switch.receive = receive
        targets = [self.anchor, *inputs] if receive is not None or not inputs else list(inputs)
        try:
            with self.watching():
                found = torch.autograd.grad(losses, targets, weights, retain_graph=retain_graph, allow_unused=True)
        except RuntimeError as error:
            if "second time" in str(error):
                raise ConsumedTape("the graph behind these losses was already used and freed.", _RUN_AGAIN) from error
            raise
        finally:
            self.switch.receive = None
        return list(found[len(targets) - len(inputs) :])

    def remember(self, losses: Tensor, collected: Any) -> None:
        self._collected = (weakref.ref(losses), collected)

    def recall(self, losses: Tensor) -> Any:
        """What was collected for these very losses, if it still is."""
        if self._collected is not None and self._collected[0]() is losses:
            return self._collected[1]
        return None

    def consume(self, losses: Tensor) -> None:
        """These losses have become a gradient; nothing more can be made of them."""
        self._collected = None
        self.root_calls.clear()
        self.head_calls.clear()
        key = id(losses)
        self._consumed[key] = weakref.ref(losses, lambda _: self._consumed.pop(key, None))

    def check_unused(self, losses: Tensor) -> None:
        consumed = self._consumed.get(id(losses))
        if consumed is not None and consumed() is losses:
            raise ConsumedTape("these losses were already turned into a gradient.", _RUN_AGAIN)


_RUN_AGAIN = "Run the model again inside capture() and use the new losses; per_example_norms may come before clipped_loss, not after."


@contextlib.contextmanager
def capture(model: nn.Module | Sequence[nn.Module], *, fallback: bool = False) -> Iterator[Tape]:
    """Watch `model` (or several modules: a model and a criterion with parameters) while the block runs.

    Everything that computes the losses from the parameters belongs into the block. `fallback=True` lets functions without
    a rule be differentiated example by example instead of being refused.

        with clipwise.capture(model) as tape:
            losses = F.cross_entropy(model(x), y, reduction="none")
        clipwise.clipped_loss(tape, losses, clipwise.flat(1.0)).backward()
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError(f"capture() takes a module or a list of modules, got {model!r}")
    tape = Tape(modules, fallback=fallback)
    hooks = [hook for module in modules for hook in _hooks(tape, module)]
    try:
        with tape.watching():
            yield tape
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(tape: Tape, module: nn.Module) -> list[Any]:
    """Note what a captured module is called with, and which nodes its outputs hang on."""
    open_calls: list[RootCall] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if tape.paused:
            return
        tape.depth += 1
        with tape.pause():
            open_calls.append(RootCall(module, args, kwargs))
            tape.marks.enters(tensors_in((args, kwargs)))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if tape.paused:
            return
        tape.depth -= 1
        call = open_calls.pop()
        if torch.is_grad_enabled() and output is not None:  # None: the call raised
            with tape.pause():
                call.output_nodes = [tensor.grad_fn for tensor in outputs_in(output)]
            tape.root_calls.append(call)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def outputs_in(output: Any) -> list[Tensor]:
    """The tensors in a model's output, in a fixed order."""
    if not isinstance(output, Tensor | list | tuple | dict) and hasattr(output, "__dict__"):
        output = vars(output)
    return list(tensors_in(output))
