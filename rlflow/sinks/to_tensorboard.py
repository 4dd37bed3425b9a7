"""TensorBoard event files in RUN_DIR/tensorboard, or in a folder of the run's name below $TENSORBOARD_DIR."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from rlflow.sinks.sink import RunInfo, Sink

FLUSH_S = 5
"""How long a value may be missing in the file."""


class TensorBoard:
    """Writes with tensorboardX, which needs neither torch nor TensorFlow."""

    def __init__(self, folder: Path, first_step: int, resumed: bool) -> None:
        from tensorboardX import SummaryWriter

        logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # NaN is a value here, and no news
        # What was written of later steps before a crash is hidden: those steps come again.
        purge = first_step if resumed else None
        self._writer = SummaryWriter(
            str(folder), flush_secs=FLUSH_S, purge_step=purge, filename_suffix=f".from-{first_step}"
        )

    def log(self, step: int, data: Mapping[str, float]) -> None:
        for name, value in data.items():
            self._writer.add_scalar(tag(name), value, step)

    def close(self, status: str) -> None:
        self._writer.close()


def tag(name: str) -> str:
    """A metric's name with what TensorBoard does not take as `_`."""
    return re.sub(r"[^-/\w.]", "_", name)


def open_sink(info: RunInfo) -> Sink:
    """OSError from the disk."""
    root = os.environ.get("TENSORBOARD_DIR")
    folder = Path(root) / info.flow / info.name if root else info.folder / "tensorboard"
    return TensorBoard(folder, info.first_step, info.resumed)
