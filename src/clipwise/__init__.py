"""Differentially private training for PyTorch at the speed of ordinary training."""

from . import rules as _rules  # noqa: F401  (importing it registers the rules)
from . import testing
from .adam import DPAdamBC
from .adaptive import adaptive
from .batches import microbatches
from .batchnorm import CannotReplace, replace_batchnorm
from .budget import Budget, compose
from .check import Report, check
from .clipping import Clipping, automatic, flat, per_group, per_layer
from .declared import constant, owners
from .errors import (
    BadClipping,
    BadData,
    BadLedger,
    BadPlan,
    BudgetSpent,
    ConsumedTape,
    ForeignGradient,
    LossIndependent,
    LossShape,
    MixedExamples,
    NothingClipped,
    Refusal,
    StateWrite,
    UncoveredUse,
    UnhookedParameter,
    UnseenUse,
    WrongDraw,
    WrongRule,
    WrongScale,
)
from .factors import Convolution, Dense, Outer, Rows
from .plan import PrivacyPlan
from .randomness import reproducible
from .registry import Call, rewrite, rule
from .release import clipped_gradients, clipped_loss, per_example_norms
from .tape import Tape, capture
from .token_losses import token_losses
from .training import PrivateTraining

__version__ = "0.1.0"

__all__ = [
    "BadClipping",
    "BadData",
    "BadLedger",
    "BadPlan",
    "Budget",
    "BudgetSpent",
    "Call",
    "CannotReplace",
    "Clipping",
    "ConsumedTape",
    "Convolution",
    "DPAdamBC",
    "Dense",
    "ForeignGradient",
    "LossIndependent",
    "LossShape",
    "MixedExamples",
    "NothingClipped",
    "Outer",
    "PrivacyPlan",
    "PrivateTraining",
    "Refusal",
    "Report",
    "Rows",
    "StateWrite",
    "Tape",
    "UncoveredUse",
    "UnhookedParameter",
    "UnseenUse",
    "WrongDraw",
    "WrongRule",
    "WrongScale",
    "adaptive",
    "automatic",
    "capture",
    "check",
    "clipped_gradients",
    "clipped_loss",
    "compose",
    "constant",
    "flat",
    "microbatches",
    "owners",
    "per_example_norms",
    "per_group",
    "per_layer",
    "replace_batchnorm",
    "reproducible",
    "rewrite",
    "rule",
    "testing",
    "token_losses",
]
