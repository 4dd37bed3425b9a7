"""Source text and places in it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import field
from functools import cached_property

from rlflow.values import dataclass


@dataclass(frozen=True)
class SourceFile:
    """One text with the name shown to the user."""

    name: str
    text: str

    @cached_property
    def _line_starts(self) -> tuple[int, ...]:
        starts = [0]
        starts.extend(i + 1 for i, char in enumerate(self.text) if char == "\n")
        return tuple(starts)

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1. An offset past the end is the place after the last character."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of line `number` (from 1), without its newline; empty when there is no such line."""
        if not 1 <= number <= len(self._line_starts):
            return ""
        start = self._line_starts[number - 1]
        end = self.text.find("\n", start)
        return self.text[start : len(self.text) if end < 0 else end].rstrip("\r")


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of offsets `[start, end)` in a file."""

    file: SourceFile = field(repr=False)
    start: int
    end: int

    def to(self, other: Span) -> Span:
        """From the start of this span to the end of the other."""
        return Span(self.file, self.start, max(self.end, other.end))

    @property
    def text(self) -> str:
        return self.file.text[self.start : self.end]

    @property
    def line(self) -> int:
        return self.file.position(self.start)[0]

    @property
    def column(self) -> int:
        return self.file.position(self.start)[1]

    @property
    def end_position(self) -> tuple[int, int]:
        return self.file.position(self.end)

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}:{self.column}"
