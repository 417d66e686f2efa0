"""A per-example gradient is a factor, not a tensor: it knows its squared norm and its weighted sum over the batch."""

from .base import Factor, Grouping
from .convolution import Convolution, Geometry
from .dense import Dense
from .diagonal import Diagonal
from .inner import inner
from .outer import Outer
from .placed import Placed
from .rows import Rows
from .squares import known
from .sums import FactorSum, PartSum, sum_of
from .together import row_squares_together

__all__ = [
    "Convolution",
    "Dense",
    "Diagonal",
    "Factor",
    "FactorSum",
    "Geometry",
    "Grouping",
    "Outer",
    "PartSum",
    "Placed",
    "Rows",
    "inner",
    "known",
    "row_squares_together",
    "sum_of",
]
