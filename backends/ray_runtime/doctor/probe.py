"""What a Ray cluster is, as JSON on standard output: `python -m ... ADDRESS WAIT_SECONDS WANTED_RESOURCES`.

A program of its own, since a Ray that does not match ends the process that joins it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.backends.ray_runtime.session import ray_session
from rlflow.diagnostics.diagnostic import RunFailure

ANSWER_S = 90.0
"""For all hosts to start a worker and answer."""
_CONNECT_S = 5.0
_PINGS = 5


def look(address: str, wait_s: float, wanted: dict[str, float]) -> dict[str, Any]:
    """Facts of the cluster; {"error": ...} when it cannot be joined. Waits until it is there and has what is wanted."""
    until = time.monotonic() + wait_s
    while True:
        closed = _closed(address)
        if closed:
            if time.monotonic() > until:
                return {"error": closed}
            time.sleep(2)
            continue
        try:
            with ray_session(address, 1, lambda phase: None):
                while not _has(ray.cluster_resources(), wanted) and time.monotonic() < until:
                    time.sleep(1)
                return {"nodes": _nodes()}
        except RunFailure as failure:
            if time.monotonic() > until:
                return {"error": "; ".join(failure.notes) or failure.message}
            time.sleep(2)


def _closed(address: str) -> str:
    """Why nothing listens at an address of host and port; "" when something does. Ray takes minutes to say so."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return ""  # such as `auto`
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        return f"nothing listens there ({getattr(error, 'strerror', None) or error})"
    return ""


def _has(resources: dict[str, float], wanted: dict[str, float]) -> bool:
    return all(resources.get(name, 0) >= count for name, count in wanted.items())


def _nodes() -> list[dict[str, Any]]:
    # Functions within a function travel by value, so that a host without rlflow can answer too.
    def facts() -> dict[str, Any]:
        import platform
        import shutil
        from importlib import metadata

        import ray

        found = {"ray": ray.__version__, "python": platform.python_version(), "torch": "", "rlflow": ""}
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["torch"] = metadata.version("torch")
        try:
            import rlflow

            found["rlflow"] = rlflow.__version__
        except Exception as error:
            found["rlflow_error"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            found["shm"] = shutil.disk_usage("/dev/shm").total
        return found

    def clock() -> float:
        import time

        return time.time()

    alive = [node for node in ray.nodes() if node["Alive"]]
    asked = {node["NodeID"]: _on(facts, node["NodeID"]).remote() for node in alive}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    found = []
    for node in alive:
        entry: dict[str, Any] = {"name": node["NodeManagerAddress"], "resources": node["Resources"]}
        try:
            entry |= ray.get(asked[node["NodeID"]], timeout=1)
            entry["clock_s"], entry["clock_error_s"] = _offset(_on(clock, node["NodeID"]))
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
        found.append(entry)
    return found


def _on(function: Callable[[], Any], node: str) -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(function).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )


def _offset(clock: Any) -> tuple[float, float]:
    """Seconds that a host's clock is ahead of this one, and how far that may be wrong: of the fastest of some answers,
    half of the time that it took (Cristian 1989)."""
    best = (0.0, float("inf"))
    for _ in range(_PINGS):
        before = time.time()
        there = ray.get(clock.remote(), timeout=30)
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = (there - (before + after) / 2, (after - before) / 2)
    return best


if __name__ == "__main__":
    address, wait, wanted = sys.argv[1:]
    sys.stdout.write(json.dumps(look(address, float(wait), json.loads(wanted))) + "\n")
