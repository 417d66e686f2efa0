"""The private step as one graph: traced once, compiled, replayed (private.compile)."""

from .step import CompiledStep

__all__ = ["CompiledStep"]
