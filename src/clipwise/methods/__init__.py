"""The paper's ways to the clipped gradient, and ours: one signature, (tape, losses, clipping) → Clipped; identical results."""

from .base import Clipped, Method, trainable
from .bookkeep import bookkeep
from .multiloss import multiloss, multiloss_alone
from .nonprivate import nonprivate
from .nxbp import nxbp, nxbp_alone
from .reweight import reweight

METHODS: dict[str, Method] = {"auto": bookkeep, "bookkeep": bookkeep, "reweight": reweight, "multiloss": multiloss, "nxbp": nxbp}

__all__ = [
    "METHODS",
    "Clipped",
    "Method",
    "bookkeep",
    "multiloss",
    "multiloss_alone",
    "nonprivate",
    "nxbp",
    "nxbp_alone",
    "reweight",
    "trainable",
]
