"""The optimizers of a private training: hooks before their steps, what must hold then, and the noised gradients they get."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from .adaptive import Adaptive
from .clipping import Clipping
from .counts import check_count
from .errors import NothingClipped, UnhookedParameter, WrongScale
from .members import members_of
from .noise import draws, noised
from .ownership import is_ours_alone
from .pending import Pending
from .plan import PrivacyPlan
from .randomness import Randomness
from .streams import OnTheWay, check_not_recorded
from .witness import Witness

_SCALE_TOLERANCE = 2.0**-7  # a bf16 loss is back-propagated with a rounded 1/k
_FIRST_STEPS = (
    4  # in which the device is waited for; a loss that is scaled later is noticed a step later (the release does not depend on it)
)

BeforeStep = Callable[[int, torch.optim.Optimizer], None]
Release = Callable[[float, int], None]  # is told the sensitivity of the sums, and for which step


def updated_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that its step changes."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All its parameters, frozen ones too."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class Updates:
    """Every optimizer's step goes through here. p.grad is replaced by the release; nothing of the optimizer is patched."""

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], plan: PrivacyPlan,
        randomness: Randomness, scaler: Any, accumulation_steps: int, before_step: BeforeStep,
    ):  # fmt: skip
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if not self.optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in self.optimizers):
            raise TypeError(f"the second argument is a torch optimizer or a list of them, got {optimizer!r}")
        self._modules = modules
        self.plan = plan
        self.randomness = randomness
        self._scaler = scaler
        self._accumulation_steps = check_count(accumulation_steps, "accumulation_steps")
        self._witness = Witness(self.name_of)
        self._scales: list[Tensor] = []  # gradients with which private losses were back-propagated, not yet looked at
        self._scales_before: OnTheWay | None = None  # those of the step before
        self._waits = 0  # steps that have waited for the device to see them
        for name, parameter in ((n, p) for module in modules for n, p in module.named_parameters()):
            if nn.parameter.is_lazy(parameter):
                raise UnhookedParameter(
                    f"{name} has no shape yet: its module is lazy.", "Run the model once, then make optimizer and training."
                )
        self._covered: list[Tensor | None] = []  # the parameters, and those of each optimizer, when they were last compared
        self._released: dict[int, list[tuple[Any, Any, int, int]]] = {}
        self._to_show: dict[int, Callable[[], list[Tensor]]] = {}  # what a recorded step has released, for p.grad after it
        self.check_coverage()
        self._is_unwatched = False
        self._handles = [one.register_step_pre_hook(self._hook(number, before_step)) for number, one in enumerate(self.optimizers)]
        self._handles += [one.register_step_post_hook(self._hook_after(number)) for number, one in enumerate(self.optimizers)]
        self._ours = {handle.id for handle in self._handles}

    def parameters(self) -> list[Tensor]:
        """Every parameter that is trainable now, once."""
        return list(self.by_name().values())

    def by_name(self) -> dict[str, Tensor]:
        """{name: parameter} of every one that is trainable now, once."""
        members = members_of(self._modules)
        return {members.names[key]: parameter for key, parameter in members.parameters.items() if parameter.requires_grad}

    def device_of(self, number: int) -> torch.device:
        """Where the first parameter of this optimizer is."""
        return next((parameter.device for parameter in held_by(self.optimizers[number])), torch.device("cpu"))

    @property
    def has_scaler(self) -> bool:
        return self._scaler is not None

    def name_of(self, parameter: Tensor) -> str:
        return members_of(self._modules).names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")

    def check_coverage(self, trainable: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Every trainable parameter belongs to exactly one optimizer, and the optimizers update nothing else. Returns them.

        `trainable`: those that are trainable now, where that was looked for in this step.
        """
        parameters = self.parameters() if trainable is None else trainable
        now = [*parameters, None, *(parameter for optimizer in self.optimizers for parameter in (None, *updated_by(optimizer)))]
        if len(now) == len(self._covered) and all(map(operator.is_, now, self._covered)):
            return parameters
        tracked = {id(parameter) for parameter in parameters}
        seen: set[int] = set()
        for optimizer in self.optimizers:
            for parameter in updated_by(optimizer):
                if id(parameter) not in tracked:
                    raise UnhookedParameter(
                        f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that belongs to none of the modules.",
                        "Its gradient would not be private: PrivateTraining([model, criterion], …), or give it an optimizer of its own.",
                    )
                if id(parameter) in seen:
                    raise UnhookedParameter(
                        f"two optimizers update {self.name_of(parameter)}.", "It would be released twice: give it to one."
                    )
                seen.add(id(parameter))
        for parameter in parameters:
            if id(parameter) not in seen:
                raise UnhookedParameter(
                    f"no optimizer of this training updates {self.name_of(parameter)}.",
                    "Add it to an optimizer (add_param_group), pass that optimizer too, or freeze it: requires_grad_(False).",
                )
        self._covered = now
        return parameters

    def about_to_add(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor], grad: Tensor) -> None:
        """A private loss is back-propagated with `grad`, and will add these gradients to those of the parameters."""
        if grad.device.type == "cpu":
            self._check_factors(OnTheWay([grad]).numbers())
        else:
            self._scales.append(grad.detach())
        self._witness.about_to_add(parameters, gradients)

    def _check_factors(self, factors: list[float]) -> None:
        """Each must be one, 1/k as declared, or either times the scaler's scale."""
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        allowed = {scale, scale / self._accumulation_steps}
        for factor in factors:
            if not any(abs(factor - right) <= _SCALE_TOLERANCE * right for right in allowed):
                raise WrongScale(
                    f"the private loss was multiplied by {factor:g} before backward().",
                    "The sum of clipped gradients may not be scaled. PrivateTraining(…, accumulation_steps=k) declares a division by k, "
                    "PrivateTraining(…, scaler=scaler) a gradient scaler; a weight for each example belongs into its loss.",
                )

    def check(self, trainable: Sequence[Tensor] | None = None) -> None:
        """Before anything is released: who is updated, what is in p.grad, how it was scaled. `trainable`: as for `check_coverage`."""
        check_not_recorded()
        self._witness.check(self.check_coverage(trainable), unscaled=self._is_unscaled())
        before, self._scales_before = self._scales_before, None
        if before is not None:
            self._check_factors(before.numbers())
        if not self._scales:
            return
        now = OnTheWay(self._scales)
        if self._waits < _FIRST_STEPS or self._scaler is not None:
            self._waits += 1
            self._check_factors(now.numbers())
        else:
            self._scales_before = now

    def _is_unscaled(self) -> bool:
        """Whether the scaler has written to p.grad: it divides before the step, unless a fused optimizer does that itself."""
        states = getattr(self._scaler, "_per_optimizer_states", {})
        return any(states[id(one)]["stage"].name == "UNSCALED" for one in self.optimizers if id(one) in states)

    def release(
        self, number: int, optimizer: torch.optim.Optimizer, sums: Mapping[int, Tensor], penalties: Mapping[int, Tensor], sensitivity: float, step: int
    ) -> None:  # fmt: skip
        """Put what is released into p.grad of everything this optimizer updates."""
        parameters, deviation = updated_by(optimizer), self.deviation(sensitivity)
        self.take_gradients_away(number)
        for parameter, grad in zip(parameters, self.noised_sums(number, sums, deviation, self.randomness, step)):
            penalty = penalties.get(id(parameter))
            parameter.grad = grad if penalty is None else grad + penalty
        self._released[number] = [
            (weakref.ref(p), weakref.ref(p.grad), p._version, p.grad._version) for p in parameters if p.grad is not None
        ]
        for group in optimizer.param_groups:
            if "noise_variance" in group:
                group["noise_variance"] = (deviation / self.plan.batch_size) ** 2
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused optimizer would divide by the scale inside its kernel
            optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]

    def take_gradients_away(self, number: int) -> None:
        """Of all that this optimizer holds, frozen or not. They were checked by now; the sums are what is released, and noise takes as much room again."""
        for parameter in held_by(self.optimizers[number]):
            parameter.grad = None
        self._witness.taken_away(updated_by(self.optimizers[number]))
        self._released[number] = []
        self._to_show.pop(number, None)

    def show_after_step(self, number: int, released: Callable[[], list[Tensor]]) -> None:
        """The step itself will find no gradient, for it was made already: this is what p.grad is to be after it."""
        self._to_show[number] = released

    def noised_sums(
        self, number: int, sums: Mapping[int, Tensor], deviation: float | Tensor, randomness: Randomness, step: int, *, apart: bool = True,
        in_place: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """(Σ clip(g_i) + noise)/B̄ for everything this optimizer updates, whether or not the losses reached it; as tensors `apart`, or `in_place`."""
        parameters = updated_by(self.optimizers[number])
        return noised(
            [sums.get(id(p)) for p in parameters], parameters, deviation=deviation, divisor=self.plan.batch_size,
            randomness=randomness, purpose=_purpose(number), step=step, apart=apart, in_place=in_place,
        )  # fmt: skip

    def draws(self, number: int) -> list[tuple[str, bool]]:
        """What the draws of `noised_sums` are for, and whether a kernel makes them."""
        return draws(updated_by(self.optimizers[number]), _purpose(number))

    def deviation(self, sensitivity: float) -> float:
        """Of the noise that is added to the clipped sums."""
        return self.plan.clipping.noise_of_sums(self.plan.noise_multiplier) * sensitivity

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """The optimizers' steps inside this block are ours: their gradients are noised already."""
        self._is_unwatched = True
        try:
            yield
        finally:
            self._is_unwatched = False

    def is_still_under_way(self, number: int) -> bool:
        """Whether the release lies untouched and no weight has moved since: an optimizer that calls its parent's step() asks twice."""
        released = self._released.get(number, [])
        for parameter_ref, grad_ref, version, grad_version in released:
            parameter, grad = parameter_ref(), grad_ref()
            if (
                parameter is None
                or grad is None
                or parameter.grad is not grad
                or parameter._version != version
                or grad._version != grad_version
            ):
                return False
        return bool(released)

    def moved_bound(self, clipping: Adaptive, bound: float, pending: Pending, step: int) -> Clipping:
        """The clipping of the next step, from the noised count of examples that lay within the bound."""
        noise = float(self.randomness.gaussians(1, "count", step, torch.device("cpu")))
        centred = sum(handed.centred_count() for handed in pending.handed if handed.counts)
        noised_count = centred + clipping.noise_of_count(self.plan.noise_multiplier) * noise
        return clipping.at(clipping.moved(bound, noised_count / self.plan.batch_size + 0.5))

    def forget(self) -> None:
        """A new step begins."""
        self._witness.forget()
        self._scales.clear()

    def is_heard_by_others(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether hooks that are not ours listen to its step, or to every optimizer's."""
        heard = torch_optimizer._global_optimizer_post_hooks or not is_ours_alone(torch_optimizer._global_optimizer_pre_hooks)
        return bool(heard) or not (
            self._ours.issuperset(optimizer._optimizer_step_pre_hooks) and self._ours.issuperset(optimizer._optimizer_step_post_hooks)
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, number: int, before_step: BeforeStep) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        weak = weakref.ref(self)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if any(callable(value) and value is not optimizer for value in (*args, *kwargs.values())):
                raise NothingClipped(
                    "step() was given a closure: what it computes would be neither clipped nor counted.",
                    "Compute losses and backward() before step(); optimizers that need closures (LBFGS) cannot train privately.",
                )
            updates = weak()
            if updates is None or not updates._is_unwatched:
                before_step(number, optimizer)

        return hook

    def _hook_after(self, number: int) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        weak = weakref.ref(self)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            updates = weak()
            if updates is not None and number in updates._to_show and not updates._is_unwatched:
                with torch._C.DisableTorchFunction():  # a tape that is still on has nothing to do with it
                    for parameter, gradient in zip(updated_by(optimizer), updates._to_show.pop(number)()):
                        parameter.grad = gradient

        return hook


def _purpose(number: int) -> str:
    """Of the noise for one optimizer."""
    return f"noise {number}"
