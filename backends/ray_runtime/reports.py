"""What the pools report of a step, put together: pools are at different steps, and a step has ended when all say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def joined_facts(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of the pools' first ranks as those of the run. Steps are counted where the data are."""
    whole = dict(facts[0])
    for other in facts[1:]:
        whole["total_steps"] = max(whole["total_steps"], other["total_steps"])
        whole["data"] = {**other["data"], **whole["data"]}
        whole["parameters"] = {**other["parameters"], **whole["parameters"]}
    return whole


class StepReports:
    """Reports of the first rank of every pool, in the order in which they come."""

    def __init__(self, pools: list[str], ranks: int) -> None:
        self._pools, self._ranks = len(pools), ranks
        self._steps: dict[int, list[dict[str, Any]]] = {}
        self._others: list[dict[str, Any]] = []

    def add(self, report: dict[str, Any]) -> None:
        """A pool's step, its evaluations of a step, or its end."""
        if report.get("ended") or report.get("evaluation"):
            self._others.append(report)
        else:
            self._steps.setdefault(report["step"], []).append(report)

    def whole(self) -> Iterator[dict[str, Any]]:
        """Steps that all pools have reported, in order, then what else has come: reports of the same form."""
        for step in sorted(self._steps):
            if len(self._steps[step]) < self._pools:
                break
            parts = self._steps.pop(step)
            yield {"step": step, "data": self._joined(step, parts), "saved": max(part["saved"] for part in parts)}
        others, self._others = self._others, []
        later = []
        for report in others:
            if self._steps and report["step"] >= min(self._steps) and self._pools > 1:
                later.append(report)  # after the step that it follows
            else:
                yield report
        self._others = later + self._others

    def _joined(self, step: int, parts: list[dict[str, Any]]) -> dict[str, float]:
        """Metrics of all pools. Times are those of the pool that took longest; others have one pool each."""
        data: dict[str, float] = {}
        for part in parts:
            for name, value in part["data"].items():
                data[name] = max(value, data.get(name, value)) if name.startswith("timing_s/") else value
        seconds = data["timing_s/step"]
        tokens = data.get("perf/total_num_tokens", 0.0)
        return data | {
            "training/global_step": float(step),
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self._ranks,
        }
