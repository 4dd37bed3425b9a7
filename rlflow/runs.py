"""A run and its folder: plan.json, run.json, metrics.jsonl, trace.json, learning_curve.svg, logs/, checkpoints/."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow import __version__
from rlflow.cluster.spec import LOCAL
from rlflow.device_rules import refuse_environment
from rlflow.diagnostics import RunFailure
from rlflow.driver import changed_sources

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.launcher import RunEnd, RunObserver
    from rlflow.backends.ray_runtime.virtual.preview import Preview
    from rlflow.backends.visualizers.progress import Progress
    from rlflow.plan import Plan


@dataclass(frozen=True)
class RunRequest:
    """What to run and where. `steps` and `seed` None = as the plan says."""

    plan: Plan
    base_dir: Path
    run_dir: Path
    steps: int | None = None
    seed: int | None = None
    resume: bool = False
    address: str | None = None
    virtual: Preview | None = None
    """Sleep in place of computing."""


class RunFolderError(Exception):
    """The run folder cannot be used as asked; the message says why."""


def default_run_dir(plan: Plan) -> Path:
    """runs/<flow>/<date>-<time>-<plan digest>"""
    import hashlib

    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:8]
    return Path("runs") / plan.flow / f"{time.strftime('%Y%m%d-%H%M%S')}-{digest}"


def open_run_dir(path: Path, *, resume: bool) -> None:
    """Make the folder; RunFolderError when it holds something already, unless resuming."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"`{path}` is a file")
    if resume:
        if not (path / "plan.json").is_file():
            raise RunFolderError(f"`{path}` is not a run folder: it has no plan.json")
        return
    if path.is_dir() and any(path.iterdir()):
        raise RunFolderError(f"`{path}` is not empty; choose another folder, or go on with `--resume {path}`")
    path.mkdir(parents=True, exist_ok=True)


def check_sources(plan: Plan, base_dir: Path, allow_changed: bool) -> None:
    """RLF4002 when a source of the plan changed since it was compiled."""
    changed = changed_sources(plan, base_dir)
    if changed and not allow_changed:
        raise RunFailure(
            "RLF4002",
            "the plan was compiled from other sources: " + ", ".join(f"`{c}`" for c in changed) + " changed since",
            help=("compile again, or run the plan as it is with `--allow-changed`",),
        )


def on_device(plan: Plan, kind: str) -> Plan:
    """A plan for this machine, on its devices of another kind. RLF4003 for a plan whose cluster says what they are."""
    pools = tuple(
        pool if pool.device == "functions" else pool.model_copy(update={"device": kind}) for pool in plan.pools
    )
    if plan.cluster != LOCAL and pools != plan.pools:
        raise RunFailure(
            "RLF4003",
            f"`--device {kind}` is for plans of this machine, and this one is for cluster `{plan.cluster}`",
            help=("compile with `--cluster local`, or leave `--device` out: the cluster says what its devices are",),
        )
    return plan.model_copy(update={"pools": pools})


def execute(request: RunRequest, progress: Progress) -> RunEnd:
    """Run, with everything recorded in the run folder, whatever the end. Raises RunFailure, KeyboardInterrupt."""
    try:
        from rlflow.backends.ray_runtime.launcher import RunSettings, run_plan
    except ImportError as error:
        raise RunFailure(
            "RLF5012",
            f"running a plan needs the package `{error.name}`, which is not installed",
            help=('pip install "rlflow-dsl[run]"',),
        ) from None
    if request.virtual is None:
        refuse_environment(request.plan, os.environ)
    request.run_dir.mkdir(parents=True, exist_ok=True)
    if request.resume:
        request = _as_before(request)
    else:
        (request.run_dir / "plan.json").write_text(request.plan.to_json(), "utf-8")
    record = _Record(request, progress)
    settings = RunSettings(
        request.base_dir, request.run_dir, request.steps, request.seed, request.resume, request.address
    )
    if request.virtual is not None:
        settings = replace(settings, virtual=request.virtual.settings)
    try:
        try:
            end = run_plan(request.plan, settings, record.observer())
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk, say: the error itself is what counts
                record.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        record.close("interrupted" if end.interrupted and end.step < end.total_steps else "finished")
    except OSError as error:  # of the disk: a failed write does not say where by itself
        raise OSError(error.errno, error.strerror, error.filename or str(request.run_dir)) from None
    return end


def _as_before(request: RunRequest) -> RunRequest:
    """A resumed run has the number of steps that it was started with, unless another one is given."""
    if request.steps is not None:
        return request
    try:
        steps = json.loads((request.run_dir / "run.json").read_text("utf-8")).get("steps")
    except (OSError, ValueError):
        return request
    return replace(request, steps=steps) if isinstance(steps, int) else request


class _Record:
    """Writes metrics as they come, and at the end the trace, the picture and run.json."""

    def __init__(self, request: RunRequest, progress: Progress) -> None:
        self._request = request
        self._progress = progress
        self._metrics_path = request.run_dir / "metrics.jsonl"
        if request.resume:
            _drop_torn_line(self._metrics_path)
        self._metrics = self._metrics_path.open("a", encoding="utf-8")
        self._started = time.time()
        self._facts: dict[str, Any] = {}
        write_run_json(request, "running", self._started, self._facts)

    def observer(self) -> RunObserver:
        from rlflow.backends.ray_runtime.launcher import RunObserver

        record = self

        class Observer(RunObserver):
            def phase(self, text: str) -> None:
                record._progress.phase(text)

            def ready(self, facts: dict[str, Any], total_steps: int, first_step: int) -> None:
                record._facts = facts | {"total_steps": total_steps}
                write_run_json(record._request, "running", record._started, record._facts)
                record._progress.total_steps = total_steps
                record._truncate(first_step - 1)

            def step(self, step: int, data: dict[str, float], saved: bool) -> None:
                record._row(step, data)
                record._progress.step(step, data)
                if saved:
                    record._progress.message(f"checkpoint of step {step} saved")

            def evaluation(self, step: int, data: dict[str, float]) -> None:
                record._row(step, data)
                shown = ", ".join(
                    f"{name} {value:.3f}" for name, value in sorted(data.items()) if name.startswith("val/")
                )
                record._progress.message(f"evaluation after step {step}: {shown}")

            def message(self, text: str) -> None:
                record._progress.message(text)

        return Observer()

    def _row(self, step: int, data: dict[str, float]) -> None:
        self._metrics.write(json.dumps({"step": step, "data": dict(sorted(data.items()))}) + "\n")
        self._metrics.flush()

    def _truncate(self, done: int) -> None:
        """On resume, forget steps after the checkpoint: they will run again."""
        if not self._request.resume:
            return
        self._metrics.close()
        rows = [row for row in read_metrics(self._metrics_path) if row["step"] <= done]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        building = self._metrics_path.with_suffix(".partial")
        building.write_text(text, "utf-8")
        building.replace(self._metrics_path)
        self._metrics = self._metrics_path.open("a", encoding="utf-8")
        _truncate_trace(self._request.run_dir, done)

    def close(self, status: str) -> None:
        self._metrics.close()
        write_run_json(self._request, status, self._started, self._facts)
        write_pictures(self._request.plan, self._request.run_dir)


def write_pictures(plan: Plan, run_dir: Path) -> None:
    """trace.json from the ranks' events and learning_curve.svg from the metrics."""
    from rlflow.backends.visualizers.curves import learning_curve_svg
    from rlflow.backends.visualizers.trace import write_trace

    events = list(read_events(run_dir))
    if events:
        first = min(event["start_us"] for event in events)
        for event in events:
            event["start_us"] -= first
        write_trace(run_dir / "trace.json", events, plan)
    rows = read_metrics(run_dir / "metrics.jsonl")
    if rows:
        (run_dir / "learning_curve.svg").write_text(learning_curve_svg(rows, plan.flow), "utf-8")


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """What the ranks recorded, one event per instruction and step; lines torn by a crash are left out."""
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # a line torn by a crash


def _truncate_trace(run_dir: Path, done: int) -> None:
    for path in (run_dir / "trace").glob("*.jsonl"):
        kept = []
        for line in path.read_text("utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    kept.append(line + "\n")
            except ValueError:
                continue
        path.write_text("".join(kept), "utf-8")


def _drop_torn_line(path: Path) -> None:
    """A crash may leave half a line at the end; what is appended must start on a new one."""
    if path.is_file():
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            path.write_bytes(whole)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows {"step": n, "data": {...}} of a metrics.jsonl; lines torn by a crash are left out."""
    rows = []
    if path.is_file():
        for line in path.read_text("utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """What `write_run_json` wrote; empty where there is nothing yet, or nothing that can be read."""
    try:
        body = json.loads((run_dir / "run.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def write_run_json(request: RunRequest, status: str, started: float, facts: dict[str, Any]) -> None:
    """What ran, on what, and how it ended."""
    versions = {"rlflow": __version__, "python": platform.python_version()}
    for package in ("ray", "torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    body = {
        "flow": request.plan.flow,
        "status": status,
        "seed": facts.get("seed", request.plan.seed if request.seed is None else request.seed),
        "steps": request.steps if request.steps is not None else facts.get("total_steps"),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "seconds": round(time.time() - started, 3),
        "versions": versions,
        "data": facts.get("data", {}),
        "parameters": facts.get("parameters", {}),
    }
    if request.virtual is not None:
        body["virtual"] = request.virtual.facts
    (request.run_dir / "run.json").write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", "utf-8")
