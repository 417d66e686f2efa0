"""Rules and rewrites, one file a family. Importing this package registers them."""

from . import convolution, einsum, elementwise, embedding, linear, normalization

__all__ = ["convolution", "einsum", "elementwise", "embedding", "linear", "normalization"]
