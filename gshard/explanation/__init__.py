"""What a partitioned program moves, why, and which annotation to change: text and a page."""

from gshard.explanation.fixes import Fix
from gshard.explanation.subject import Subject
from gshard.explanation.text import explain

__all__ = ["Fix", "Subject", "explain"]
