"""What a sink is, and what it is told of its run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

REMEMBERED = "sinks.json"
"""The file of a run folder with what sinks call the run, so that a resumed run goes on under that name."""


class Sink(Protocol):
    """States: open -> log(...)... -> close. Called by one thread; whatever it raises ends it and not the run."""

    def log(self, step: int, data: Mapping[str, float]) -> None:
        """A row of metrics.jsonl: of a step, or of an evaluation after it, which may come after the next step's."""

    def close(self, status: str) -> None:
        """The run has ended: `finished`, `interrupted` or `failed`. Comes back when all rows have been written."""


@dataclass(frozen=True)
class RunInfo:
    """A run as sinks see it. `resumed`: rows of steps that were logged before may come again."""

    flow: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Plain values to show beside the curves: seed, cluster, versions, ..."""
    resumed: bool = False
    first_step: int = 1
    """No row before it comes."""

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    def remembered(self, sink: str) -> str:
        """The name of the run at a sink that wants one of its own: as before in this folder, else a new one."""
        known = self._known()
        if sink not in known:
            self.remember(sink, uuid.uuid4().hex[:16])
        return self._known()[sink]

    def recalled(self, sink: str) -> str:
        """The same where it was given one in this folder, else empty."""
        return self._known().get(sink, "")

    def remember(self, sink: str, name: str) -> None:
        """Keep what a sink calls the run. OSError from the disk."""
        text = json.dumps(self._known() | {sink: name}, indent=2, sort_keys=True)
        (self.folder / REMEMBERED).write_text(text + "\n", "utf-8")

    def _known(self) -> dict[str, str]:
        try:
            known = json.loads((self.folder / REMEMBERED).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in known.items()} if isinstance(known, dict) else {}
