"""Ending a try of a run: every process that it started is gone before the next one starts.

Ray kills the workers of rewards and environments with the rank that owns them. A process that is stopped or hangs in C
code is ended by Ray after some seconds. Waiting for it matters where devices are asked for again: their memory is only
free when the process is gone, and Ray counts a resource as free before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlflow.amounts import size
from rlflow.backends.ray_runtime.place import Identity, memory_free
from rlflow.backends.ray_runtime.start_ranks import Started, StartedRank

END_S = 20.0
"""For processes to be gone after they were killed."""
_POLL_S = 0.05
_FACTS_S = 2.0


@contextlib.contextmanager
def ended_with(started: Started) -> Iterator[None]:
    """Around a try: whatever ends it early ends its processes. After a good end the ranks end by themselves; the other
    actors would stay as long as this process is connected to Ray, since a call that never returns is under way."""
    try:
        yield
    except BaseException:
        _kill(started.actors)
        raise
    _kill(started.others)


def _kill(actors: list[Any]) -> None:
    """Kill actors, and do not wait."""
    for actor in actors:
        with contextlib.suppress(Exception):  # dead already, or Ray itself is gone
            ray.kill(actor)


def wait_until_gone(started: Started) -> list[Identity]:
    """Wait until the ranks' processes have ended; those that are still there after END_S seconds."""
    by_node: dict[str, list[Identity]] = defaultdict(list)
    for rank in started.ranks:
        identity = _known(rank)
        if identity is not None:
            by_node[identity.node].append(identity)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    here = socket.gethostname()
    asked = {}
    for node, processes in by_node.items():
        if node in alive and processes[0].host != here:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(_left)
            asked[remote.remote([process.pid for process in processes], END_S)] = processes
    left: list[Identity] = []
    for processes in by_node.values():
        if processes[0].host == here:
            pids = set(_left([process.pid for process in processes], END_S))
            left += [process for process in processes if process.pid in pids]
    for ref, processes in asked.items():
        try:
            pids = set(ray.get(ref, timeout=2 * END_S))
        except ray.exceptions.RayError:
            continue  # the host has gone meanwhile, or has no room for a process that looks
        left += [process for process in processes if process.pid in pids]
    return left


def death_facts(dead: StartedRank, ranks: Sequence[StartedRank]) -> list[str]:
    """What can still be found out about a rank that died: its host, whether that is gone too, its memory."""
    identity = _known(dead)
    if identity is None:
        return []
    facts = [f"it was process {identity.pid} on host {identity.host}"]
    if identity.node not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
        return [*facts, f"host {identity.host} is gone from the cluster"]
    free = memory_free() if identity.host == socket.gethostname() else None
    if free is None:
        near = (r for r in ranks if r is not dead and (known := _known(r)) is not None and known.node == identity.node)
        for rank in near:
            with contextlib.suppress(ray.exceptions.RayError):
                ref = rank.actor.where.options(concurrency_group="control").remote()
                free = ray.get(ref, timeout=_FACTS_S).host_memory_free
                break
    return facts if free is None else [*facts, f"memory that is free on that host now: {size(free)}"]


def _known(rank: StartedRank) -> Identity | None:
    """The rank's process, if it has said so before it died."""
    try:
        done, _ = ray.wait([rank.identity], timeout=0)
        found: Identity | None = ray.get(done[0]) if done else None
    except ray.exceptions.RayError:
        return None
    return found


def _left(pids: list[int], seconds: float) -> list[int]:
    """Which of these processes of this host are there after so many seconds."""
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if _is_there(pid)]:
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    return left


def _is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        pass
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
