"""SwanLab. Offline unless SWANLAB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlflow.sinks.sink import RunInfo, Sink


class SwanLab:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, data: Mapping[str, float]) -> None:
        self._run.log(dict(data), step=step)

    def close(self, status: str) -> None:
        if status == "finished":
            self._run.finish()
        else:
            self._run.finish(state="crashed", error=status)


def open_sink(info: RunInfo) -> Sink:
    """SwanLab's own errors."""
    import swanlab

    run = swanlab.init(
        project=os.environ.get("SWANLAB_PROJECT", f"rlflow-{info.flow}"),
        name=info.name,
        id=info.remembered("swanlab"),
        resume="allow",
        config=dict(info.settings),
        log_dir=os.environ.get("SWANLAB_LOG_DIR", str(info.folder / "swanlab")),
        mode=os.environ.get("SWANLAB_MODE", "offline"),
    )
    return SwanLab(run)
