"""What all values of a plan share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PlanPart(BaseModel):
    """A value: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class SpanRef(PlanPart):
    """A place in a source file; lines and columns count from 1, the end is exclusive."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
