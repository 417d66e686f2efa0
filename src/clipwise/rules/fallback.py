"""A call nobody wrote a rule for, differentiated example by example: slow, exact, and only on request (`fallback=True`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..functions import trait_of
from ..registry import Call, Factors, Rule, Use, all_but_last

if TYPE_CHECKING:
    from ..watch import Watch


def differentiate_each_example(watch: Watch, use: Use) -> Any:
    """Run the call on aliases of its weights and keep its output: gradients of the aliases are those of this call alone."""

    aliases = [weight.view_as(weight) for weight in use.tracked]

    def with_alias(value: Any) -> Any:
        return next((alias for alias, weight in zip(aliases, use.tracked) if value is weight), value)

    upstream = use.upstream()
    args, kwargs = use.mapped(with_alias)
    output = use.func(*args, **kwargs)
    if isinstance(output, Tensor) and not output.requires_grad:
        return output
    if not isinstance(output, Tensor):
        raise watch.refusal(use, one_tensor=False)
    tapped = watch.insert_tap(output, Use(use.func, (aliases,), {}, [*use.tracked, *aliases]), fallback_rule, upstream, local=output)
    watch.note(use.func, trait_of(use.func), use.args, use.kwargs, tapped)
    return tapped


def _factors(call: Call) -> Factors:
    raise AssertionError("a fallback record is differentiated by its output, not by a rule")


fallback_rule = Rule(_factors, row_axes=all_but_last(0), trusted=True)
