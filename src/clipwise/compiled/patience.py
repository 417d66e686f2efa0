"""When there is nothing left to hope for: batches for which no graph would ever be made, or none used twice. Then that is said, and no more is tried."""

from __future__ import annotations

from dataclasses import dataclass, field

from .rows import Batch

STEPS = 8  # after which nothing is left to hope for, if no way through the model has been verified
ATTEMPTS = 3  # at the same thing
_REPLACEMENTS = 8


@dataclass
class Patience:
    """What has come of the steps so far."""

    alone: int = 0  # steps with a single example, while nothing was verified
    words: list[str] = field(default_factory=list)  # among the arguments of the last step …
    other_words: int = 0  # … and how often they were others
    replaced: int = 0  # graphs, one after the other, that were void before they were used: the model had other tensors

    def why_never(self, batch: Batch, *, is_verified: bool) -> str | None:
        """Why a training with such batches is not compiled; None as long as it may be."""
        if not any(batch.has_rows):
            return "no tensor of the batch has one row an example along its first axis."
        words = [leaf for leaf in batch.leaves if type(leaf) is str]
        self.other_words += bool(self.words) and words != self.words
        self.words = words
        self.alone += batch.count == 1 and not is_verified
        if self.other_words >= ATTEMPTS:
            return "words among the arguments are others in every batch, and a graph is for one of them: leave them out, or pass numbers."
        if self.alone > STEPS:
            return "batches have a single example, with which nothing can be verified that holds for several."
        if self.replaced > _REPLACEMENTS:
            return "the model's parameters or buffers are replaced by others again and again: write into them (copy_) instead."
        return None
