"""Weights & Biases. Offline unless WANDB_MODE says otherwise: a run that is not asked to sends nothing anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlflow.sinks.sink import RunInfo, Sink

STEP = "training/global_step"


class Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run
        # wandb drops rows whose own step has passed, as those of an evaluation or of a resumed run: this is the axis.
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)

    def log(self, step: int, data: Mapping[str, float]) -> None:
        self._run.log({**data, STEP: step})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def open_sink(info: RunInfo) -> Sink:
    """wandb's own errors, for instance of a server that cannot be reached in mode `online`."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", f"rlflow-{info.flow}"),
        name=info.name,
        id=info.remembered("wandb"),
        resume="allow",
        dir=str(info.folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=dict(info.settings),
        settings=settings,
    )
    return Wandb(run)
