"""The reason of a collective, as data for passes and pages; text is made where it is shown."""

from __future__ import annotations

from dataclasses import dataclass, replace

_TAG = "gshard"
_OF = ("operand", "result", "carried value", "condition", "index")


@dataclass(frozen=True)
class Reason:
    """What needs a value, and how the value is brought there.

    `kind` is "operand", "result" or the like of an `operator`; "asked" for what the user wrote in a
    manual region; "step" for what an operator sends as a part of its own work. Where several values
    share a collective, `values` is their number.
    """

    kind: str
    operator: str = ""
    detail: str = ""
    values: int = 1

    @property
    def is_asked(self) -> bool:
        """Whether the user wrote the collective."""
        return self.kind == "asked"

    def then(self, detail: str) -> Reason:
        """The same, with how the value is brought there."""
        return replace(self, detail=f"{self.detail}: {detail}" if self.detail else detail)

    def __str__(self) -> str:
        subject = self.operator
        if self.kind in _OF:
            subject = f"{self.kind} of {self.operator}"
        elif self.is_asked:
            subject = f"asked for in {self.operator}"
        text = ": ".join(part for part in (subject, self.detail) if part)
        return f"{self.values} values combined: {text}" if self.values > 1 else text

    def encoded(self) -> str:
        """As a name scope, which equations keep and profilers show."""
        return "|".join([_TAG, self.kind, self.operator, str(self.values), self.detail])

    @staticmethod
    def decoded(scope: str) -> Reason | None:
        """The reason encoded in a name scope, if there is one."""
        tag, *parts = scope.split("|", 4)
        if tag != _TAG or len(parts) != 4:
            return None
        kind, operator, values, detail = parts
        return Reason(kind, operator, detail, int(values))


NO_REASON = Reason("")
