"""A run and its folder: plan.json, run.json, metrics.jsonl, trace.json, learning_curve.svg, logs/, checkpoints/."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections import Counter
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
from rlflow.run_record import forget_after, recorded_step
from rlflow.run_rows import drop_torn_line, json_lines
from rlflow.sinks.fan_out import CLOSE_S, Sinks
from rlflow.sinks.names import sink_names
from rlflow.sinks.sink import RunInfo

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.launcher import RunEnd, RunObserver
    from rlflow.backends.ray_runtime.restarts import Restart
    from rlflow.backends.ray_runtime.virtual.preview import Preview
    from rlflow.backends.visualizers.progress import Progress
    from rlflow.plan import Plan


TRACE_EVENTS = 100_000
"""In trace.json, of the last steps: more would not open in a viewer. The folder trace/ has all."""
HASTE_S = 3.0
"""For log targets to write what they have when the user does not want to wait."""


@dataclass(frozen=True)
class RunRequest:
    """What to run and where. `steps` and `seed` None = as the plan says.

    `keep`: newest checkpoints to keep, 0 = all; None = as before, all in a new run.
    """

    plan: Plan
    base_dir: Path
    run_dir: Path
    steps: int | None = None
    seed: int | None = None
    resume: bool = False
    address: str | None = None
    log: tuple[str, ...] = ()
    """Where metrics go besides metrics.jsonl, by the names of `rlflow.sinks.names`."""
    keep: int | None = None
    restarts: int | None = None
    """How often the run is started again after a process died; None = as often as is usual."""
    virtual: Preview | None = None
    """Sleep in place of computing."""


class RunFolderError(Exception):
    """The run folder cannot be used as asked; the message says why."""


def default_run_dir(plan: Plan) -> Path:
    """runs/<flow>/<date>-<time>-<plan digest>"""
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


def resume_request(run_dir: Path, *, allow_changed: bool = False) -> RunRequest:
    """To go on in the folder of an earlier run, with its plan. RunFolderError, RunFailure RLF4001, RLF4002, and RLF5010
    for the folder of a virtual run."""
    from rlflow import driver

    open_run_dir(run_dir, resume=True)
    if read_run_json(run_dir).get("virtual"):
        raise RunFailure(
            "RLF5010",
            f"there is no checkpoint to resume from in `{run_dir}`: it is of a virtual run, which has no weights",
            help=("start another one: `rlflow run FILE --device virtual`",),
        )
    plan = driver.load_plan(run_dir / "plan.json")
    base_dir = driver.find_base_dir(plan, run_dir / "plan.json")
    check_sources(plan, base_dir, allow_changed)
    return RunRequest(plan, base_dir, run_dir, resume=True)


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
        from rlflow.backends.ray_runtime.restarts import DEFAULT_RESTARTS
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
    request = replace(request, log=sink_names(request.log))
    if not request.resume:
        (request.run_dir / "plan.json").write_text(request.plan.to_json(), "utf-8")
    record = _Record(request, progress)
    settings = RunSettings(
        request.base_dir,
        request.run_dir,
        request.steps,
        request.seed,
        request.resume,
        keep=request.keep or 0,
        address=request.address,
        restarts=DEFAULT_RESTARTS if request.restarts is None else request.restarts,
        virtual=None if request.virtual is None else request.virtual.settings,
    )
    try:
        try:
            end = run_plan(request.plan, settings, record.observer())
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk, say: the error itself is what counts
                if isinstance(error, KeyboardInterrupt):
                    record.close("interrupted", HASTE_S)
                else:
                    record.close("failed")
            raise
        record.close("interrupted" if end.interrupted and end.step < end.total_steps else "finished")
    except OSError as error:  # of the disk: a failed write does not say where by itself
        raise OSError(error.errno, error.strerror, error.filename or str(request.run_dir)) from None
    return end


def _as_before(request: RunRequest) -> RunRequest:
    """A resumed run has the steps, checkpoints to keep and log targets that it was started with, unless others are
    given."""
    before = read_run_json(request.run_dir)
    steps, keep, log = before.get("steps"), before.get("keep_checkpoints"), before.get("log")
    if request.steps is None and isinstance(steps, int):
        request = replace(request, steps=steps)
    if request.keep is None and isinstance(keep, int):
        request = replace(request, keep=keep)
    if not request.log and isinstance(log, list):
        request = replace(request, log=tuple(str(name) for name in log))
    return request


def _checkpoint_step(run_dir: Path) -> int:
    """The step to resume after; 0 where that is not known."""
    from rlflow.backends.ray_runtime.checkpoint_folder import latest_step

    try:
        return latest_step(run_dir / "checkpoints") or 0
    except RunFailure:
        return 0  # the run ends with it


class _Record:
    """Writes metrics as they come, and at the end the trace, the picture and run.json."""

    def __init__(self, request: RunRequest, progress: Progress) -> None:
        self._request = request
        self._progress = progress
        self._metrics_path = request.run_dir / "metrics.jsonl"
        if request.resume:
            drop_torn_line(self._metrics_path)
        self._metrics = self._metrics_path.open("a", encoding="utf-8")
        self._started = time.time()
        self._facts: dict[str, Any] = {}
        self._restarts: list[dict[str, Any]] = []
        write_run_json(request, "running", self._started, self._facts)
        self._sinks = self._open_sinks()

    def _open_sinks(self) -> Sinks:
        """Before anything else starts. RLF5062."""
        request = self._request
        if request.log:
            self._progress.phase(f"opening {', '.join(request.log)}")
        plan = request.plan
        settings = {
            "seed": plan.seed if request.seed is None else request.seed,
            "cluster": plan.cluster,
            "plan": hashlib.sha256(plan.to_json().encode()).hexdigest()[:16],
            "rlflow": __version__,
        }
        first = _checkpoint_step(request.run_dir) + 1 if request.resume else 1
        try:
            return Sinks(request.log, RunInfo(plan.flow, request.run_dir, settings, request.resume, first))
        except BaseException:
            write_run_json(request, "failed", self._started, self._facts)
            raise

    def observer(self) -> RunObserver:
        from rlflow.backends.ray_runtime.launcher import RunObserver

        record = self

        class Observer(RunObserver):
            def phase(self, text: str) -> None:
                record._progress.phase(text)

            def ready(self, facts: dict[str, Any], total_steps: int, first_step: int) -> None:
                record._facts = facts | {"total_steps": total_steps, "restarts": record._restarts}
                write_run_json(record._request, "running", record._started, record._facts)
                record._progress.total_steps = total_steps
                record._truncate(first_step - 1)
                if "prometheus" in record._request.log:
                    from rlflow.backends.ray_runtime.prometheus import endpoint

                    record._progress.message(f"metrics for Prometheus: {endpoint() or 'this Ray serves none'}")

            def step(self, step: int, data: dict[str, float], saved: int) -> None:
                record._row(step, data)
                record._progress.step(step, data)
                if saved:
                    record._progress.message(f"checkpoint of step {saved} saved")

            def evaluation(self, step: int, data: dict[str, float]) -> None:
                record._row(step, data)
                shown = ", ".join(
                    f"{name} {value:.3f}" for name, value in sorted(data.items()) if name.startswith("val/")
                )
                record._progress.message(f"evaluation after step {step}: {shown}")

            def message(self, text: str) -> None:
                record._progress.message(text)

            def restarting(self, restart: Restart) -> None:
                record._restarts.append(restart.row())
                record._facts["restarts"] = record._restarts
                write_run_json(record._request, "running", record._started, record._facts)
                for line in restart.sentence().splitlines():
                    record._progress.message(line)

            def recorded(self) -> int | None:
                last = record._facts.get("total_steps") if record._request.steps is None else record._request.steps
                return recorded_step(record._request.plan, record._metrics_path, last)

        return Observer()

    def _row(self, step: int, data: dict[str, float]) -> None:
        self._metrics.write(json.dumps({"step": step, "data": dict(sorted(data.items()))}) + "\n")
        self._metrics.flush()
        self._tell(self._sinks.row(step, data))

    def _tell(self, failures: list[RunFailure]) -> None:
        """What went wrong on the way to a sink: the run and metrics.jsonl go on."""
        for failure in failures:
            words = "".join(f" ({note})" for note in failure.notes)
            self._progress.message(f"warning[{failure.code}]: {failure.message}{words}; metrics.jsonl goes on")

    def _truncate(self, done: int) -> None:
        """Forget the steps after the checkpoint, which will run again; 0 = all, evaluations before the first too."""
        if not self._request.resume and not self._restarts:
            return
        self._metrics.close()
        forget_after(self._request.run_dir, done)
        self._metrics = self._metrics_path.open("a", encoding="utf-8")

    def close(self, status: str, sink_seconds: float = CLOSE_S) -> None:
        self._metrics.close()
        self._tell(self._sinks.close(status, sink_seconds))
        write_run_json(self._request, status, self._started, self._facts)
        write_pictures(self._request.plan, self._request.run_dir)


def write_pictures(plan: Plan, run_dir: Path) -> None:
    """trace.json from the ranks' events and learning_curve.svg from the metrics."""
    from rlflow.backends.visualizers.curves import is_drawn, learning_curve_svg
    from rlflow.backends.visualizers.trace import write_trace

    events = last_events(run_dir, TRACE_EVENTS)
    if events:
        first = min(event["start_us"] for event in events)
        for event in events:
            event["start_us"] -= first
        write_trace(run_dir / "trace.json", events, plan)
    rows = [
        {"step": row["step"], "data": {name: value for name, value in row["data"].items() if is_drawn(name)}}
        for row in json_lines(run_dir / "metrics.jsonl")
    ]
    if rows:
        (run_dir / "learning_curve.svg").write_text(learning_curve_svg(rows, plan.flow), "utf-8")


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """What the ranks recorded, one event per instruction and step; lines torn by a crash are left out."""
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        yield from json_lines(path)


def last_events(run_dir: Path, most: int) -> list[dict[str, Any]]:
    """The events of the last steps, as many whole steps as have at most so many events, but at least one."""
    counts: Counter[int] = Counter(event["step"] for event in read_events(run_dir))
    total, first = 0, 0
    for step in sorted(counts, reverse=True):
        total += counts[step]
        if total > most and step != max(counts):
            break
        first = step
    return [event for event in read_events(run_dir) if event["step"] >= first]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows {"step": n, "data": {...}} of a metrics.jsonl; lines torn by a crash are left out."""
    return list(json_lines(path))


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
        "keep_checkpoints": request.keep or 0,
        "data": facts.get("data", {}),
        "parameters": facts.get("parameters", {}),
        "restarts": facts.get("restarts", []),
        **({"log": list(request.log)} if request.log else {}),
        **({} if request.virtual is None else {"virtual": request.virtual.facts}),
    }
    (request.run_dir / "run.json").write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", "utf-8")
