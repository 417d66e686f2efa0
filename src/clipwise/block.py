"""A capture block without a `with`: opened by the first call of a module, closed when the losses are handed over.

Between the two the tape is on, as inside `capture`, so that the loss function is watched too. A forward pass whose losses never
come (an evaluation with gradients enabled) leaves the block open; what nobody holds any more is forgotten before the next call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .errors import UncoveredUse
from .footprints import Footprint, is_plain
from .kept import Age, Made
from .modes import stacked
from .program import ROOM
from .tape import Tape, root_hooks
from .tracing import is_inside_torch_compile
from .watch import Watch


class Block:
    """Opens and closes tapes for modules that are called by themselves."""

    def __init__(self, modules: Sequence[nn.Module], *, fallback: bool):
        self.modules = list(modules)
        self.fallback = fallback
        self._tape: Tape | None = None
        self._entered = contextlib.ExitStack()
        self._looked_at = 0  # root calls that survived the last look
        self.is_asleep = False
        self.made = Made()
        self.inputs: list[Footprint] = []  # rows that modules were called with, outside the roots
        below = dict.fromkeys(module for root in self.modules for module in root.modules() if module not in self.modules)
        hookable = [module for module in below if not isinstance(module, torch.jit.ScriptModule)]
        self._below = _Openers(hookable, self.open)
        hooks: list[Any] = []
        for root in self.modules:
            hooks.append(root.register_forward_pre_hook(OwnHook(self._enter_root), prepend=True))
            hooks += root_hooks(root, lambda: self._tape, wrap=OwnHook)
            hooks.append(root.register_forward_hook(OwnHook(self._leave_root), always_call=True))
        self._hooks = hooks

    def _enter_root(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.open(module, args)
        if self._tape is not None:
            self._below.take_off()  # they would find that there is nothing to do

    def _leave_root(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tape = self._tape
        if tape is None or not tape.depth:
            self._below.put_on()
        if tape is not None and output is None and not tape.depth and not tape.root_calls and sys.exc_info()[1] is not None:
            self.close()  # it raised, and nothing came before it: the tape would stay on, and watch the training after this one

    def open(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is about to run. Inside one that is watched there is nothing to do."""
        if self._tape is not None and self._tape.depth:
            return
        if self.is_asleep or not torch.is_grad_enabled():
            return
        if is_inside_torch_compile():
            _refuse_compiled()
        tape, is_root = self._tape, module in self.modules
        if tape is not None and is_root and not tape.depth and len(tape.root_calls) > 2 * self._looked_at:
            tape.tidy()  # amortised over many calls of one block
            self._looked_at = len(tape.root_calls)
        if tape is not None and tape.is_abandoned:
            self.close()
        if self._tape is None and not self._is_captured():
            self.begin()
        if self._tape is not None and not self._tape.depth and not is_root:
            self.inputs += [Footprint.of(value) for value in args if isinstance(value, Tensor) and is_plain(value) and value.stride(0) > 0]

    def begin(self) -> None:
        """Watch from now on, until the losses are handed over."""
        self.close()
        self._tape = Tape(self.modules, fallback=self.fallback)
        self._tape.room = ROOM
        self._tape.marks.lenient, self._tape.marks.made = True, self.made
        self.made.now = Age()
        self._entered.enter_context(self._tape.watching(low=True))

    def _is_captured(self) -> bool:
        """Whether a `capture` of the same modules is on: then these calls are for it."""
        return any(isinstance(mode, Watch) and any(root in mode.tape.modules for root in self.modules) for mode in stacked())

    def asleep(self) -> Asleep:
        """Modules that run now are run by us, or computed again for a backward pass of ours: they open nothing."""
        return Asleep(self)

    def close(self) -> Tape | None:
        """The tape of everything since the block was opened, if it was."""
        tape, self._tape = self._tape, None
        self._looked_at = 0
        self.inputs = []
        self._below.put_on()
        self._entered.close()
        if tape is not None:
            tape.finish()
        return tape

    def remove(self) -> None:
        """Leave no trace on the modules."""
        self.close()
        self._below.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class Asleep:
    """Entered in every step, so it is a class and not a generator."""

    __slots__ = ("_block",)

    def __init__(self, block: Block):
        self._block = block

    def __enter__(self) -> None:
        self._block.is_asleep = True

    def __exit__(self, *_: object) -> None:
        self._block.is_asleep = False


@_disable_dynamo  # which in torch 2.11 cannot raise what it traces
def _refuse_compiled() -> None:
    raise UncoveredUse(
        "a module of this training is called through torch.compile, whose calls no tape can see.",
        "Hand the compiled module to PrivateTraining (it then runs eagerly while it is trained), or call the module itself; a module that was "
        "compiled in place, model.compile(), must be made anew.",
    )


class _Openers:
    """Hooks on the modules below the roots, for those who call them by themselves. Torch takes a longer way through modules with hooks, and a model
    has many: while a root runs, they are off."""

    def __init__(self, modules: Iterable[nn.Module], function: Any):
        handles = [module.register_forward_pre_hook(OwnHook(function), prepend=True) for module in modules]
        self._hooks = [(handle.hooks_dict_ref, handle.id) for handle in handles]
        self._off: list[tuple[Any, int, Any]] = []

    def take_off(self) -> None:
        if not self._off:
            found = [(hooks, key) for reference, key in self._hooks if (hooks := reference()) is not None and key in hooks]
            self._off = [(hooks, key, hooks.pop(key)) for hooks, key in found]

    def put_on(self) -> None:
        """Where they were: before all others."""
        for hooks, key, hook in self._off:
            hooks[key] = hook
            hooks.move_to_end(key, last=False)
        self._off = []

    def remove(self) -> None:
        self.take_off()
        self._hooks, self._off = [], []


class OwnHook:
    """A hook that copies and pickles of the module do not take along: in them it is a function of the standard library that does nothing."""

    def __init__(self, function: Any):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__
