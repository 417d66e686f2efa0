"""Rules and rewrites, one file a family. Importing this package registers them."""

from . import attention, convolution, distances, einsum, elementwise, embedding, grouped, linear, normalization, recurrent

__all__ = ["attention", "convolution", "distances", "einsum", "elementwise", "embedding", "grouped", "linear", "normalization", "recurrent"]
