"""What a partitioned program moves, why, and which annotation to change: text and a page."""

from gshard.explaining.fixes import Fix
from gshard.explaining.subject import Subject
from gshard.explaining.text import explain

__all__ = ["Fix", "Subject", "explain"]
