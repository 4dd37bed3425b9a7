"""Metrics for Prometheus, through Ray: its metrics agent serves them beside Ray's own, from the machine of the driver.

Names are those of metrics.jsonl with `rlflow_` before and `_` for what Prometheus does not take; Ray puts `ray_` before
all of that. What a name says about a pool, queue, stage or rank is a tag, so that one query sees them all:
`pool/rollout/idle` is `ray_rlflow_pool_idle{pool="rollout"}`. Every series has the tags `run` and `flow`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlflow.sinks.sink import RunInfo, Sink

_TAGGED = (
    (re.compile(r"pool/(?P<pool>[^/]+)/wait_s/(?P<instruction>.+)"), "pool_wait_s"),
    (re.compile(r"(?P<_>pool|memory|val|val-aux)/(?P<tag>[^/]+)/(?P<rest>.+)"), ""),
    (re.compile(r"rank/(?P<pool>[^/]+)/(?P<rank>\d+)/(?P<rest>.+)"), "rank"),
    (re.compile(r"queue/(?P<queue>.+)/(?P<rest>[^/]+)"), "queue"),
    (re.compile(r"age/(?P<stage>[^/]+)/count/(?P<age>\d+)"), "age_count"),
    (re.compile(r"age/(?P<stage>[^/]+)/(?P<rest>[^/]+)"), "age"),
    (re.compile(r"timing_s/(?P<stage>.+)"), "timing_s"),
)
_FAMILY_TAG = {"pool": "pool", "memory": "pool", "val": "evaluation", "val-aux": "evaluation"}


class Prometheus:
    """Gauges of the last step's values, and counters of steps and tokens."""

    def __init__(self, info: RunInfo) -> None:
        self._tags = {"run": info.name, "flow": info.flow}
        self._gauges: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._counters: dict[str, Any] = {}

    def log(self, step: int, data: Mapping[str, float]) -> None:
        for name, value in data.items():
            self._gauge(*series(name)).set(float(value), tags=self._tags | series(name)[1])
        if "training/global_step" in data:
            self._count("rlflow_steps", "Training steps of this run since it was started.", 1.0)
            tokens = data.get("perf/total_num_tokens", 0.0)
            if tokens > 0:
                self._count("rlflow_tokens", "Prompt and response tokens since the run was started.", tokens)

    def close(self, status: str) -> None:
        """The last values stay until Ray forgets the driver."""

    def _gauge(self, name: str, tags: Mapping[str, str]) -> Any:
        keys = (*self._tags, *tags)
        if (name, keys) not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[name, keys] = Gauge(f"rlflow_{name}", description=f"rlflow: {name}", tag_keys=keys)
        return self._gauges[name, keys]

    def _count(self, name: str, what: str, by: float) -> None:
        if name not in self._counters:
            from ray.util.metrics import Counter

            self._counters[name] = Counter(name, description=what, tag_keys=tuple(self._tags))
        self._counters[name].inc(by, tags=self._tags)


def series(name: str) -> tuple[str, dict[str, str]]:
    """Prometheus's name of a metric, without `rlflow_`, and the tags that are taken out of it."""
    for pattern, family in _TAGGED:
        found = pattern.fullmatch(name)
        if found is None:
            continue
        parts = found.groupdict()
        kind, tag = parts.pop("_", None), parts.pop("tag", None)
        if kind is not None and tag is not None:
            family = kind
            parts = {_FAMILY_TAG[kind]: tag, **parts}
        rest = parts.pop("rest", "")
        return _plain(f"{family}/{rest}" if rest else family), parts
    return _plain(name), {}


def _plain(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def open_sink(info: RunInfo) -> Sink:
    """Nothing is asked of Ray before the first row, when the run is connected."""
    return Prometheus(info)


def endpoint() -> str:
    """Where this machine's Ray serves metrics, as http://HOST:PORT/metrics; empty where it does not."""
    import ray

    here = ray.util.get_node_ip_address()
    for node in ray.nodes():
        if node.get("Alive") and node.get("MetricsExportPort") and node["NodeManagerAddress"] == here:
            return f"http://{here}:{node['MetricsExportPort']}/metrics"
    return ""
