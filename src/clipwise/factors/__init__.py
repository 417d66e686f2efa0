"""A per-example gradient is a factor, not a tensor: it knows its squared norm and its weighted sum over the batch."""

from .base import Factor, Grouping
from .convolution import Convolution, Geometry
from .dense import Dense
from .diagonal import Diagonal
from .inner import inner
from .outer import Outer
from .parts import PartSum, sum_of
from .placed import Placed
from .rows import Rows
from .squares import Squares, finish, known
from .sums import FactorSum
from .together import products, products_of_columns, row_squares_of_each, row_squares_together, weighted_sums_together

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
    "Squares",
    "finish",
    "inner",
    "known",
    "products",
    "products_of_columns",
    "row_squares_of_each",
    "row_squares_together",
    "sum_of",
    "weighted_sums_together",
]
