"""The main job: train a network privately on a data set, and leave behind what is needed to believe it."""

from .job import TrainJob
from .presets import PRESETS
from .run import Outcome, run

__all__ = ["PRESETS", "Outcome", "TrainJob", "run"]
