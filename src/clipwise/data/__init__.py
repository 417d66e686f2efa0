"""Data: standard files people have on disk, ways to get them, and a small real data set in the package."""

from .catalog import NAMES, DataSet, default_folder, load
from .fetch import fetch
from .images import Examples, fashion_mnist
from .reviews import Words, read_glove

__all__ = ["NAMES", "DataSet", "Examples", "Words", "default_folder", "fashion_mnist", "fetch", "load", "read_glove"]
