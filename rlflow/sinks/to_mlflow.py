"""MLflow: into the database RUN_DIR/mlflow.db unless MLFLOW_TRACKING_URI names a server or another place."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from rlflow.sinks.sink import RunInfo, Sink

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class Mlflow:
    def __init__(self, client: Any, run: str) -> None:
        self._client, self._run = client, run

    def log(self, step: int, data: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(key(name), float(value), now, step) for name, value in data.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run, status=_STATUS.get(status, "FAILED"))


def key(name: str) -> str:
    """A metric's name with what MLflow does not take as `_`."""
    return re.sub(r"[^-/\w. :]", "_", name)


def open_sink(info: RunInfo) -> Sink:
    """MLflow's own errors."""
    from mlflow import MlflowClient

    folder = info.folder.absolute()
    own = f"sqlite:///{folder / 'mlflow.db'}"  # mlflow writes no more to plain files
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", own))
    known = info.recalled("mlflow")
    if known:
        client.update_run(known, status="RUNNING")
        return Mlflow(client, known)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", f"rlflow-{info.flow}")
    experiment = client.get_experiment_by_name(name)
    number = (
        client.create_experiment(name, (folder / "mlflow").as_uri()) if experiment is None else experiment.experiment_id
    )
    run: str = client.create_run(number, run_name=info.name).info.run_id
    for setting, value in info.settings.items():
        client.log_param(run, setting, value)
    info.remember("mlflow", run)
    return Mlflow(client, run)
