"""One rank of a pool: a Ray actor that holds a device, loads its part, and executes the pool's instruction list."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint
from rlflow.backends.ray_runtime.execute import Interpreter, stage_failed
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Evaluation, Plan, Program


@dataclass(frozen=True)
class RankSettings:
    """What a rank is told at its start. `rendezvous` is host:port of rank 0's group, empty with one rank."""

    plan_json: str
    pool: str
    rank: int
    world: int
    base_dir: str
    run_dir: str
    seed: int
    threads: int
    deadline_s: float = 600.0
    """Limit of every wait for another rank."""


class Rank:
    """States: new -> load(part)... -> ready -> run() -> ended. `request_stop` may be called from another thread."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._run_dir = Path(settings.run_dir)
        self._log_to_file()
        torch.set_num_threads(settings.threads)
        plan = Plan.from_json(settings.plan_json)
        self._state = RankState(
            plan, settings.pool, settings.rank, settings.world, Path(settings.base_dir), settings.seed
        )
        self._program: Program = next(p for p in plan.programs if p.pool == settings.pool)
        self._stop = threading.Event()
        self._saved_step: int | None = None
        self._interpreter: Interpreter | None = None
        self._trace = (self._run_dir / "trace" / f"{settings.pool}-{settings.rank}.jsonl").open("a", encoding="utf-8")

    def _log_to_file(self) -> None:
        """Everything this process prints goes to the run folder, not between the user's progress lines."""
        path = self._run_dir / "logs" / f"{self._settings.pool}-{self._settings.rank}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable(sys.__stderr__)

    # --- start-up ----------------------------------------------------------------------------------------------------

    def address(self) -> str:
        """host:port on which rank 0's group can be reached; the port is free now."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str) -> RunFailure | None:
        """Form the pool's process group (gloo)."""
        return _guarded("start-up", lambda: self._join(address))

    def _join(self, address: str) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}",
            rank=self._settings.rank,
            world_size=self._settings.world,
            timeout=timedelta(seconds=self._settings.deadline_s),
        )
        self._state.group = dist.group.WORLD

    def load(self, part: str) -> RunFailure | None:
        """Load `models`, `data` or `rewards`. Failures are returned, so that Ray adds nothing to them."""
        load = {
            "models": self._state.load_models,
            "data": self._state.load_data,
            "rewards": self._state.open_rewards,
        }[part]
        return _guarded(f"loading {part}", load)

    def resume(self, step: int) -> RunFailure | None:
        """Go back to the state after `step` steps."""
        return _guarded("resume", lambda: load_checkpoint(self._state, self._checkpoints, step))

    def facts(self) -> dict[str, Any]:
        """What the driver shows and records: steps to run, data fingerprints, model sizes."""
        return {
            "total_steps": self._state.total_steps(),
            "data": {
                name: {"rows": len(data), "sha256": data.fingerprint} for name, data in self._state.data.items()
            },
            "parameters": {
                name: sum(p.numel() for p in model.loaded.model.parameters())
                for name, model in self._state.models.items()
            },
        }

    @property
    def _checkpoints(self) -> Path:
        return self._run_dir / "checkpoints"

    # --- the run -----------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run after the step in progress."""
        self._stop.set()

    def run(self, done: int, last: int) -> Iterator[dict[str, Any] | RunFailure]:
        """Steps done + 1 .. last with their evaluations; yields a report after each, at last one with `ended`.

        A failure is yielded, not raised. Ranks other than 0 yield nothing before the end.
        """
        try:
            yield from self._run(done, last)
        except RunFailure as failure:
            yield failure
        except Exception as error:
            yield stage_failed("", error)
        finally:
            self._trace.close()
            self._state.close()
            if self._state.group is not None:
                dist.destroy_process_group()

    def _run(self, done: int, last: int) -> Iterator[dict[str, Any]]:
        self._interpreter = Interpreter(self._state, self._save)
        step = done
        if step < last:
            report = self._evaluate(step, list(self._program.evaluations)) if done == 0 else None
            if report is not None:
                yield report
        while step < last and not self._agreed_to_stop():
            step += 1
            started = time.time()
            metrics = self._metrics()
            self._interpreter.run(self._program.step, step, metrics)
            ended = time.time()
            metrics.seconds["step"] = ended - started
            due = [e for e in self._program.evaluations if step == last or (e.every and step % e.every == 0)]
            self._write_events(metrics)
            data = self._reduced(metrics)
            if data is not None:
                data |= self._derived(data, step)
                yield {"step": step, "data": data, "saved": self._saved_step == step}
            report = self._evaluate(step, due)
            if report is not None:
                yield report
        if step > 0 and self._saved_step != step:
            self._save(step)
        if self._settings.rank == 0:
            yield {"ended": True, "step": step, "checkpoint": f"checkpoints/global_step_{step}" if step else ""}

    def _evaluate(self, step: int, evaluations: list[Evaluation]) -> dict[str, Any] | None:
        if not evaluations:
            return None
        assert self._interpreter is not None
        started = time.time()
        out: dict[str, float] = {}
        for evaluation in evaluations:
            metrics = self._metrics(evaluation.name)
            self._interpreter.run(evaluation.instructions, step, metrics)
            data = self._reduced(metrics)
            self._write_events(metrics)
            for name, value in (data or {}).items():
                if name.endswith("/mean") or name.endswith("clip_ratio"):
                    family = "val-aux" if "_length" in name else "val"
                    out[f"{family}/{evaluation.name}/{name}"] = value
        if self._settings.rank != 0:
            return None
        out["timing_s/testing"] = time.time() - started
        return {"step": step, "data": out, "evaluation": True}

    def _metrics(self, evaluation: str = "") -> StepMetrics:
        return StepMetrics(self._state.plan, self._settings.pool, self._settings.rank, evaluation)

    def _reduced(self, metrics: StepMetrics) -> dict[str, float] | None:
        """The metrics over all ranks, on rank 0; None elsewhere."""
        if self._state.group is None:
            return reduce_parts([metrics.parts()])
        gathered: list[Any] | None = [None] * self._settings.world if self._settings.rank == 0 else None
        dist.gather_object(metrics.parts(), gathered, dst=0, group=self._state.group)
        return None if gathered is None else reduce_parts(gathered)

    def _derived(self, data: dict[str, float], step: int) -> dict[str, float]:
        seconds = data["timing_s/step"]
        tokens = data.get("perf/total_num_tokens", 0.0)
        return {
            "training/global_step": float(step),
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self._settings.world,
        }

    def _write_events(self, metrics: StepMetrics) -> None:
        for event in metrics.events:
            self._trace.write(json.dumps(event, sort_keys=True) + "\n")
        self._trace.flush()

    def _agreed_to_stop(self) -> bool:
        """Whether any rank was asked to stop: all leave after the same step."""
        stop = self._stop.is_set()
        if self._state.group is None:
            return stop
        flag = torch.tensor([int(stop)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._state.group)
        return bool(flag.item())

    def _save(self, step: int) -> None:
        """Rank 0 writes: with data parallelism all ranks hold the same state."""
        if self._settings.rank == 0:
            save_checkpoint(self._state, self._checkpoints, step)
        self._saved_step = step


def _guarded(stage: str, action: Callable[[], None]) -> RunFailure | None:
    try:
        action()
    except RunFailure as failure:
        return failure.at(stage)
    except Exception as error:
        return stage_failed(stage, error)
    return None
