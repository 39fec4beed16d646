"""What guesses. A drafter fills drafts for the rows of a step; verification does not care which."""

from .ngram import NgramDrafter

__all__ = ["NgramDrafter"]
