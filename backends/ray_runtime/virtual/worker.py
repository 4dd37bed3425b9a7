"""A worker of a virtual run: walks its pool's instruction list for all ranks that it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlflow.backends.ray_runtime.deliveries import due
from rlflow.backends.ray_runtime.dist_queue.client import DistQueue
from rlflow.backends.ray_runtime.failures import stage_failed
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.place import PlaceNote
from rlflow.backends.ray_runtime.virtual.clock import Clock
from rlflow.backends.ray_runtime.virtual.edges import Ends, OpenEnd
from rlflow.backends.ray_runtime.virtual.interpreter import Self, VirtualInterpreter
from rlflow.backends.ray_runtime.virtual.post import Post
from rlflow.backends.ray_runtime.virtual.settings import WorkerSettings, times_of, total_steps
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Evaluation, Plan


class VirtualWorker:
    """States: new -> ready -> run -> ended."""

    def __init__(
        self,
        settings: WorkerSettings,
        clock: Clock | None = None,
        post: Post | None = None,
        place: PlaceNote | None = None,
        open_end: OpenEnd = DistQueue,
    ) -> None:
        self._settings = settings
        self._plan = Plan.from_json(settings.plan_json)
        self._program = self._plan.program(settings.pool)
        self._clock = clock or Clock(settings.speed_up, settings.epoch)
        self._post = post or Post()
        ranks = range(settings.first, settings.first + settings.count)
        me = Self(settings.pool, ranks, settings.member, settings.members)
        ends = Ends(self._plan, settings.pool, ranks, settings.sizes, settings.queues, self._post, open_end)
        self._interpreter = VirtualInterpreter(
            self._plan,
            me,
            times_of(self._plan, settings.settings),
            self._clock,
            ends,
            settings.fabric,
            settings.seed,
            settings.payload_share,
            place or PlaceNote(),
        )
        path = Path(settings.run_dir) / "trace" / f"{settings.pool}-{settings.first}.jsonl"
        self._trace = path.open("a", encoding="utf-8")

    def facts(self) -> dict[str, Any]:
        """What the driver shows and records. A virtual run has no data and no parameters."""
        return {
            "total_steps": total_steps(self._plan),
            "seed": self._settings.seed,
            "data": {},
            "parameters": {},
        }

    def run(self, done: int, last: int) -> Iterator[dict[str, Any] | RunFailure]:
        """Steps done + 1 .. last with their evaluations; yields a report after each, at last one with `ended`.

        A failure is yielded, not raised. Workers other than the first of a pool yield nothing else.
        """
        try:
            yield from self._run(done, last)
        except RunFailure as failure:
            yield failure
        except Exception as error:
            yield stage_failed("", error)
        finally:
            self._trace.close()

    def _run(self, done: int, last: int) -> Iterator[dict[str, Any]]:
        step = done
        yield from self._evaluate(step, list(self._program.evaluations) if done == 0 else [])
        while step < last and self._may_begin(step + 1):
            step += 1
            data = self._step(step)
            if data is not None:
                yield {"step": step, "data": data, "saved": 0}
            yield from self._evaluate(step, [e for e in self._program.evaluations if due(e, step, last)])
        if self._settings.member == 0:
            yield {"ended": True, "step": step, "checkpoint": ""}

    def _step(self, step: int) -> dict[str, float] | None:
        """The step's metrics on the pool's first worker; None elsewhere."""
        metrics = self._metrics("")
        started, real = self._clock.now(), self._clock.real()
        slept, waited, sent = self._clock.slept, self._post.waited, self._post.sent.total()
        self._interpreter.run(self._program.step, step, metrics)
        metrics.whole_step(self._clock.now() - started, self._settings.members[self._settings.pool])
        seconds = self._clock.real() - real
        slept, waited = self._clock.slept - slept, self._post.waited - waited
        name = f"virtual/{self._settings.pool}"
        metrics.highs[f"{name}/slept_s"] = slept
        metrics.highs[f"{name}/waited_s"] = waited
        metrics.highs[f"{name}/overhead_ms"] = (seconds - slept - waited) * 1e3
        metrics.sums[f"{name}/messages"] = float(self._post.sent.total() - sent)
        return self._reduced(metrics, f"step {step}")

    def _evaluate(self, step: int, evaluations: list[Evaluation]) -> Iterator[dict[str, Any]]:
        if not evaluations:
            return
        started = self._clock.now()
        for evaluation in evaluations:
            metrics = self._metrics(evaluation.name)
            self._interpreter.run(evaluation.instructions, step, metrics)
            self._reduced(metrics, f"{evaluation.name} {step}")
        if self._settings.member == 0:
            yield {"step": step, "data": {"timing_s/testing": self._clock.now() - started}, "evaluation": True}

    def _metrics(self, evaluation: str) -> StepMetrics:
        return StepMetrics(self._plan, self._settings.pool, self._settings.first, evaluation)

    def _reduced(self, metrics: StepMetrics, what: str) -> dict[str, float] | None:
        for event in metrics.events:
            self._trace.write(json.dumps(event, sort_keys=True) + "\n")
        self._trace.flush()
        settings = self._settings
        members = settings.members[settings.pool]
        if members == 1:
            return reduce_parts([metrics.parts()])
        key = f"{settings.pool} {what}"
        self._post.ask([("give", settings.fabric, (key, settings.member, metrics.parts()))])
        if settings.member:
            return None
        return reduce_parts(self._answer("collect", key, members))

    def _may_begin(self, step: int) -> bool:
        """Whether the run goes on with this step: the first worker of a pool asks, and tells the others.

        It asks after it has collected the metrics of the step before, so that none of the others is further behind.
        """
        settings = self._settings
        if settings.member:
            (answer,) = self._answer("told", settings.pool, step)
            return bool(answer)
        (answer,) = self._post.ask([("begin", settings.control, (step,))])
        if settings.members[settings.pool] > 1:
            self._post.ask([("tell", settings.fabric, (settings.pool, step, answer))])
        return bool(answer)

    def _answer(self, method: str, *arguments: Any) -> list[Any]:
        """Of the fabric. RunFailure RLF5019 where it has waited too long."""
        (answer,) = self._post.ask([(method, self._settings.fabric, arguments)])
        if isinstance(answer, str):
            limit = self._plan.collective_timeout_s
            raise RunFailure(
                "RLF5019", f"pool `{self._settings.pool}` waited {limit:g} s for its other ranks", notes=(answer,)
            )
        found: list[Any] = answer
        return found
