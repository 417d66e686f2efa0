"""The paper's networks."""

from .paper import cnn, mlp

__all__ = ["cnn", "mlp"]
