"""What a partitioned program moves, why, and which annotation to change: text and a page."""

from gshard.explanation.explained import Explanation
from gshard.explanation.fixes import Fix
from gshard.explanation.subject import Subject

__all__ = ["Explanation", "Fix", "Subject"]
