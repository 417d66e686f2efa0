"""Plans and clippings as JSON. A field that is misspelt, missing or of another kind is refused, never ignored."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adaptive import Adaptive
from .clipping import Automatic, Clipping, Flat, PerGroup, PerLayer
from .errors import BadPlan
from .files import write_whole
from .hints import did_you_mean

if TYPE_CHECKING:
    from .plan import PrivacyPlan

_KINDS: dict[str, type[Clipping]] = {
    "flat": Flat, "per_layer": PerLayer, "per_group": PerGroup, "automatic": Automatic, "adaptive": Adaptive,
}  # fmt: skip


def as_dict(plan: PrivacyPlan) -> dict[str, Any]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return values | {"clipping": clipping_as_dict(plan.clipping)}


def from_dict(cls: type[PrivacyPlan], values: dict[str, Any]) -> PrivacyPlan:
    known = [field.name for field in fields(cls)]
    _refuse_unknown(values, known, "a plan")
    missing = [name for name in ("dataset_size", "batch_size", "delta", "clipping", "noise_multiplier") if name not in values]
    if missing:
        raise BadPlan(f"the plan lacks {', '.join(missing)}.", f"A plan has the fields {', '.join(known)}.")
    return cls(**(values | {"clipping": clipping_from_dict(values["clipping"])}))


def clipping_as_dict(clipping: Clipping) -> dict[str, Any]:
    """{"kind": "flat", "bound": 1.0}"""
    kind = next((name for name, cls in _KINDS.items() if type(clipping) is cls), None)
    if kind is None:
        raise BadPlan(
            f"a {type(clipping).__name__} cannot be written down.", f"Use one of {', '.join(_KINDS)}, or keep this plan in Python."
        )
    return {"kind": kind} | {field.name: getattr(clipping, field.name) for field in fields(clipping)}  # type: ignore[arg-type]


def clipping_from_dict(values: Any) -> Clipping:
    if not isinstance(values, dict) or values.get("kind") not in _KINDS:
        raise BadPlan(
            f"a clipping must name its kind, got {values!r}.", f'For example {{"kind": "flat", "bound": 1.0}}; kinds: {", ".join(_KINDS)}.'
        )
    cls = _KINDS[values["kind"]]
    given = {name: value for name, value in values.items() if name != "kind"}
    _refuse_unknown(given, [field.name for field in fields(cls)], f"the clipping {values['kind']}")  # type: ignore[arg-type]
    if "bounds" in given:
        given["bounds"] = tuple((str(pattern), bound) for pattern, bound in given["bounds"])
    try:
        return cls(**given)
    except TypeError as error:
        raise BadPlan(f"the clipping {values['kind']} is incomplete: {error}.", "Write it as PrivacyPlan.save does.") from None


def save(plan: PrivacyPlan, path: str | Path) -> None:
    write_whole(path, json.dumps(as_dict(plan), indent=2, ensure_ascii=False) + "\n")


def load(cls: type[PrivacyPlan], path: str | Path) -> PrivacyPlan:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise BadPlan(f"{path} is not JSON: {error}.", "A plan is written with plan.save(path).") from None
    if not isinstance(values, dict):
        raise BadPlan(f"{path} holds no plan.", "A plan is written with plan.save(path).")
    return from_dict(cls, values)


def _refuse_unknown(values: dict[str, Any], known: list[str], what: str) -> None:
    for name in values:
        if name not in known:
            raise BadPlan(f"{what} has no field {name!r}.", did_you_mean(name, known, f"The fields are {', '.join(known)}."))
