"""What a training is made of: a frozen set of choices, from the command line, a preset or a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..data import NAMES as DATA
from ..errors import BadPlan
from ..hints import did_you_mean
from ..models.zoo import NAMES as MODELS
from ..release import can_be_compiled, check_method

OPTIMIZERS = ("sgd", "adam", "adam-bc")
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """data and model by name; ε, δ and the length; clipping, optimizer and machine."""

    data: str = "embedded"
    model: str = "cnn"
    epsilon: float = 3.0
    delta: float = 1e-5
    epochs: int = 8
    batch_size: int = 256
    clip: float = 1.0
    lr: float = 2e-3
    optimizer: str = "adam"
    momentum: float = 0.9
    method: str = "auto"
    sampler: str = "poisson"
    noise: str = "fast"
    precision: str = "fp32"
    compile: bool = False
    microbatch: int | None = None
    device: str = "auto"
    workers: int = 0
    seed: int = 0  # of the first weights; noise and draws do not depend on it
    data_folder: str | None = None
    image_size: int = 64  # side of LSUN's pictures
    limit: int | None = None  # at most so many of LSUN's pictures
    glove: str | None = None

    def __post_init__(self) -> None:
        base = self.data.removeprefix("synthetic-")
        for what, value, choices in (
            ("data", base, DATA), ("model", self.model, MODELS), ("optimizer", self.optimizer, OPTIMIZERS), ("precision", self.precision, PRECISIONS),
        ):  # fmt: skip
            if value not in choices:
                raise BadPlan(f"there is no {what} {value!r}.", did_you_mean(value, choices, f"Choose one of {', '.join(choices)}."))
        check_method(self.method)
        if self.compile and not can_be_compiled(self.method):
            raise BadPlan(f"a compiled step clips by bookkeep, not by {self.method}.", "Leave out --compile, or --method.")

    def changed(self, values: dict[str, Any]) -> TrainJob:
        """With other values for some fields; an unknown one is refused."""
        known = [field.name for field in fields(self)]
        for name in values:
            if name not in known:
                raise BadPlan(f"a training has no setting {name!r}.", did_you_mean(name, known, f"Settings: {', '.join(known)}."))
        return replace(self, **values)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_settings(path: Path) -> dict[str, Any]:
    """Settings from a TOML, YAML or JSON file."""
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".toml":
            import tomllib

            values = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = _yaml(text)
        else:
            values = json.loads(text)
    except ValueError as error:
        raise BadPlan(f"{path} cannot be read: {error}.", "Settings are written as TOML, YAML or JSON: epsilon = 3.0") from None
    if not isinstance(values, dict):
        raise BadPlan(f"{path} holds no settings.", "One setting a line: epsilon = 3.0")
    return {name.replace("-", "_"): value for name, value in values.items()}


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("YAML files need the package PyYAML: pip install pyyaml, or write TOML") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
