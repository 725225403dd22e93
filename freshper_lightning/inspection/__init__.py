"""What is inside a replay buffer, as text and as pictures."""

from freshper_lightning.inspection.entries import SORTS, Entry, Sort, entries, first
from freshper_lightning.inspection.text import episode, overview

__all__ = ["SORTS", "Entry", "Sort", "entries", "episode", "first", "overview"]
