"""Differentially private training for PyTorch at the speed of ordinary training."""

from . import rules as _rules  # noqa: F401  (importing it registers the rules)
from . import testing
from .batchnorm import CannotReplace, replace_batchnorm
from .check import Report, check
from .clipping import Clipping, automatic, flat, per_group, per_layer
from .declared import constant, owners
from .errors import (
    BadClipping,
    ConsumedTape,
    LossIndependent,
    LossShape,
    MixedExamples,
    Refusal,
    StateWrite,
    UncoveredUse,
    UnseenUse,
    WrongRule,
)
from .factors import Convolution, Dense, Outer, Rows
from .registry import Call, rewrite, rule
from .release import clipped_gradients, clipped_loss, per_example_norms
from .tape import Tape, capture
from .token_losses import token_losses

__version__ = "0.1.0"

__all__ = [
    "BadClipping",
    "Call",
    "CannotReplace",
    "Clipping",
    "ConsumedTape",
    "Convolution",
    "Dense",
    "LossIndependent",
    "LossShape",
    "MixedExamples",
    "Outer",
    "Refusal",
    "Report",
    "Rows",
    "StateWrite",
    "Tape",
    "UncoveredUse",
    "UnseenUse",
    "WrongRule",
    "automatic",
    "capture",
    "check",
    "clipped_gradients",
    "clipped_loss",
    "constant",
    "flat",
    "owners",
    "per_example_norms",
    "per_group",
    "per_layer",
    "replace_batchnorm",
    "rewrite",
    "rule",
    "testing",
    "token_losses",
]
