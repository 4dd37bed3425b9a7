"""State of a pool that is plain JSON: whoever keeps some puts it into `RankState.owned` before a resume."""

from __future__ import annotations

from typing import Any, Protocol


class Owned(Protocol):
    """Part of a pool's state. The first rank of the pool writes it with a checkpoint, all its ranks get it back.

    A pool writes into a checkpoint when it trains, or is ahead of what is trained.
    """

    def saved(self, step: int) -> Any:
        """JSON of the state after step `step`, which has just ended on this pool."""

    def restore(self, state: Any) -> None:
        """Go back to what `saved` gave. Not called where the checkpoint has nothing under this name."""
