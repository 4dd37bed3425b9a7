"""What a run needs around it: a Ray connection, a pool's resources, and Ctrl-C."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlflow.backends.ray_runtime.connect import INIT_ERRORS, connect
from rlflow.device_rules import RAY_RESOURCE
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Pool

PLACE_DEADLINE_S = 60.0
"""For Ray to give the pool its resources."""
_POLL_S = 0.2
_CLEANUP_S = 10.0
_NOISY = ("ray._private.accelerators.npu", "ray._private.accelerators", "ray._private.authentication")


class Interrupts:
    """Ctrl-C and SIGTERM. During start-up nothing is worth saving, so the first one raises KeyboardInterrupt. After
    `finish_steps` the first one only counts, which asks for a clean stop, and the second one raises."""

    def __init__(self) -> None:
        self.count = 0
        self._patience = 0
        self._raised_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._ended = False

    def __enter__(self) -> Interrupts:
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended = True
        if self._raised_at is not None:
            # The interpreter drops Python's handlers while it ends; one more Ctrl-C would then change the exit code.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        else:
            for number, handler in self._previous.items():
                with contextlib.suppress(ValueError):
                    signal.signal(number, handler)

    def install(self) -> None:
        """Again after `ray.init`, which takes SIGTERM for itself."""
        for number in self._previous:
            with contextlib.suppress(ValueError):  # not the main thread: the caller handles signals
                signal.signal(number, self._handle)

    def finish_steps(self) -> None:
        """From now on the step in progress is worth waiting for."""
        self._patience = 1

    def start_up(self) -> None:
        """Nothing is in progress that is worth waiting for, as before `finish_steps`. KeyboardInterrupt where one came
        meanwhile."""
        self._patience = 0
        if self.count:
            self._raised_at = time.monotonic()
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: object) -> None:
        if self._raised_at is not None and time.monotonic() < self._raised_at + _CLEANUP_S:
            return  # one more, while the first one is cleaned up after, which goes on to the end of the process
        if self._ended:
            previous = self._previous[number]
            if callable(previous):
                previous(number, frame)
            return
        self.count += 1
        if self.count > self._patience:
            self._raised_at = time.monotonic()
            raise KeyboardInterrupt


@contextlib.contextmanager
def ray_session(address: str | None, min_cpus: int, on_phase: Callable[[str], None]) -> Iterator[None]:
    """A Ray connection for the run: to `address`, else RAY_ADDRESS, else a local Ray of at least `min_cpus` CPUs that
    ends with the run. One that was there before is used and left as it is."""
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    on_phase(f"connecting to Ray at {address}" if address else "starting Ray")
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        options["address"] = address
    else:
        # A pool of several ranks on this machine shares its cores, so Ray is told of as many CPUs as ranks.
        options |= {
            "address": "local",  # and not one that somebody has started on this machine
            "num_cpus": max(os.cpu_count() or 1, min_cpus),
            "include_dashboard": False,
            "configure_logging": False,
        }
    try:
        if address:
            connect(address, options)
        else:
            try:
                ray.init(**options)
            except (*INIT_ERRORS, ray.exceptions.RayError) as error:
                notes = (f"{type(error).__name__}: {error}",)
                raise RunFailure("RLF5008", "Ray does not start on this machine", notes=notes) from None
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Reserved:
    """Resources that Ray has set aside: a bundle for every host of the plan."""

    group: PlacementGroup
    bundle_of: Mapping[str, int]


@contextlib.contextmanager
def reserved(pools: Sequence[Pool], deadline_s: float | None = None) -> Iterator[Reserved]:
    """A placement group with the ranks of every host of the plan in one bundle, so that they are on one machine.

    RLF5008 with wanted and available when it is not given in `deadline_s` seconds, PLACE_DEADLINE_S unless given.
    """
    deadline_s = PLACE_DEADLINE_S if deadline_s is None else deadline_s
    wanted: dict[str, Counter[str]] = {}
    for pool in pools:
        for place in pool.ranks:
            wanted.setdefault(place.host, Counter()).update(["CPU", *device_resources(pool)])
    bundles = [{name: float(count) for name, count in bundle.items()} for bundle in wanted.values()]
    group = placement_group(bundles, strategy="PACK", name=f"rlflow-{os.getpid()}")
    try:
        # Short waits: a single long one would not let Ctrl-C through.
        until = time.monotonic() + deadline_s
        while not group.wait(timeout_seconds=_POLL_S):
            if time.monotonic() > until:
                raise _not_placed(pools, list(wanted.values()), deadline_s)
        yield Reserved(group, {host: index for index, host in enumerate(wanted)})
    finally:
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def device_resources(pool: Pool) -> dict[str, float]:
    """What a rank asks Ray for beside its CPU. Ray then makes that one device visible to it."""
    return {} if pool.device == "cpu" else {RAY_RESOURCE[pool.device]: 1.0}


def _not_placed(pools: Sequence[Pool], bundles: list[Counter[str]], deadline_s: float) -> RunFailure:
    have, total = ray.available_resources(), ray.cluster_resources()
    names = ", ".join(f"`{pool.name}`" for pool in pools)
    kinds = Counter(tuple(bundle.items()) for bundle in bundles)
    wanted = ", ".join(
        f"{count} bundle{'s' * (count > 1)} of "
        + " and ".join(f"{size} {name}{'s' * (size > 1)}" for name, size in bundle)
        for bundle, count in kinds.items()
    )
    return RunFailure(
        "RLF5008",
        f"Ray did not give pool{'s' * (len(pools) > 1)} {names} what they need within {deadline_s:g} s",
        notes=(
            f"wanted: {wanted}, each on one machine",
            *(
                f"the cluster has {total.get(name, 0.0):g} {name}s, {have.get(name, 0.0):g} of them free"
                for name in dict.fromkeys(name for bundle in bundles for name in bundle)
            ),
        ),
        help=("use smaller pools, or free the cluster",),
    )
