"""What clipwise would do with a model, before any training: every trainable parameter with its rule, way and refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .again import isolated, random_states_kept
from .collect import collect
from .errors import Refusal
from .expected import expected_of
from .structure import every_tensor
from .tape import Tape, capture
from .testing import squared_output


@dataclass(frozen=True)
class ParameterReport:
    """One trainable parameter. `status`: exact, refused, unused, or unknown where only a run could tell."""

    name: str
    shape: tuple[int, ...]
    status: str
    rule: str = ""  # the torch functions that use it
    way: str = ""  # how its norms are evaluated
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `check` found. Printable; `ok` says whether nothing is refused or unknown."""

    parameters: list[ParameterReport]
    refusals: list[Refusal] = field(default_factory=list)  # of the model as a whole: mixed examples, state written

    @property
    def ok(self) -> bool:
        return not self.refusals and all(row.status in ("exact", "unused") for row in self.parameters)

    def __str__(self) -> str:
        head = ("parameter", "shape", "status", "rule", "way")
        rows = [(p.name, "×".join(map(str, p.shape)) or "1", p.status, p.rule, p.way) for p in self.parameters]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows]]
        reasons = dict.fromkeys(f"{p.name}: {p.reason}" for p in self.parameters if p.reason)
        return "\n".join([*lines, *reasons, *(f"refused: {refusal}" for refusal in self.refusals)])


def check(model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None, fallback: bool = False, **keywords: Any) -> Report:
    """List every trainable parameter of `model` with its rule, way and refusal. Nothing is trained or changed.

    With inputs (a made-up batch of two examples or more will do) the model is run on a copy of its state, and everything is
    verified as on a first step; `loss` maps its output to one loss an example, by default a square of the first output. Without
    inputs the modules are only looked at: what a module of your own does shows only when it runs.

        print(clipwise.check(model, torch.randn(4, 3, 32, 32)))
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not inputs and not keywords:
        keywords = dict(getattr(model, "dummy_inputs", None) or {})  # Hugging Face's
    if not inputs and not keywords:
        return Report([_expected(model, name, parameter) for name, parameter in trainable.items()])
    loss = loss or _of_first_output
    uses: dict[str, list[str]] = {}
    with random_states_kept():
        lenient = _run(model, inputs, keywords, loss, fallback, uses=uses, lenient=True)
        refused = {name: refusal for names, refusal in lenient.refusals or [] for name in names}
        general = [refusal for names, refusal in lenient.refusals or [] if not names]
        ways: dict[str, str] = {}
        if not general:
            with _frozen([trainable[name] for name in refused]):
                try:
                    _run(model, inputs, keywords, loss, fallback, uses=uses, lenient=False, ways=ways)
                except Refusal as refusal:
                    general.append(refusal)
    rows = []
    for name, parameter in trainable.items():
        rule = ", ".join(dict.fromkeys(uses.get(name, [])))
        reason = refused[name].what if name in refused else ""
        status = "refused" if reason else "exact" if name in ways else "unknown" if general else "unused"
        rows.append(ParameterReport(name, tuple(parameter.shape), status, rule, ways.get(name, ""), reason))
    return Report(rows, general)


def _run(
    model: nn.Module,
    inputs: Any,
    keywords: Any,
    loss: Any,
    fallback: bool,
    *,
    uses: dict[str, list[str]],
    lenient: bool,
    ways: dict[str, str] | None = None,
) -> Tape:
    copy = isolated(model)
    with capture(copy, fallback=fallback) as tape:
        tape.uses = uses
        tape.refusals = [] if lenient else None
        losses = loss(copy(*inputs, **keywords))
    if ways is not None and losses.requires_grad:
        gradients = collect(tape, losses)
        with tape.pause():
            gradients.squared_norms()
        ways.update(gradients.ways())
    return tape


def _of_first_output(output: Any) -> Tensor:
    """A square of the first floating-point tensor that carries a gradient."""
    for tensor in every_tensor(output):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.dim():
            return squared_output(tensor)
    raise ValueError("check() found no output with a gradient; pass loss=, a function from the model's output to one loss an example")


@contextmanager
def _frozen(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _expected(model: nn.Module, name: str, parameter: Tensor) -> ParameterReport:
    path, _, leaf = name.rpartition(".")
    status, rule, reason = expected_of(model.get_submodule(path), leaf)
    return ParameterReport(name, tuple(parameter.shape), status, rule, "", reason)
