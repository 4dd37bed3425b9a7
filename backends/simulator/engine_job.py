"""A request inside an engine."""

from __future__ import annotations

from collections.abc import Hashable

from rlflow.backends.simulator.engine_messages import Request, Segments


class Job:
    """Changes as it runs. Numbers are tokens; `joined` is the offset of its rank when it began to decode."""

    __slots__ = (
        "computed",
        "era",
        "generated",
        "id",
        "joined",
        "length",
        "phase",
        "prefix",
        "prompt",
        "segments",
        "shared",
        "ticket",
    )

    def __init__(self, request: Request, shared: int) -> None:
        self.id = request.id
        self.prompt = request.prompt
        self.length = request.length
        self.segments: Segments = request.segments
        self.generated = request.generated
        """When it last began or stopped decoding."""
        self.shared = shared
        self.prefix: tuple[Hashable, int] | None = (request.group, request.prompt) if shared else None
        """Names what it shares."""
        self.computed = 0
        """Of its context, while it is prefilled."""
        self.ticket = -1
        """Of its entry in the heap of completions, while it decodes; -1 otherwise."""
        self.joined = self.era = self.phase = 0


def extended(segments: Segments, version: int, tokens: int) -> Segments:
    """With more tokens of a version at the end."""
    if not tokens:
        return segments
    if segments and segments[-1][0] == version:
        return (*segments[:-1], (version, segments[-1][1] + tokens))
    return (*segments, (version, tokens))
