"""Data that comes with the package."""

from .embedded import Images, fashion_mnist

__all__ = ["Images", "fashion_mnist"]
