"""Waits for other processes end, and say who waited for what."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlflow.backends.ray_runtime import weight_channel
from rlflow.backends.ray_runtime.waiting import answer
from rlflow.backends.ray_runtime.weight_channel import WeightChannel
from rlflow.diagnostics import RunFailure


@pytest.mark.ray
def test_an_actor_that_does_not_answer(ray_cluster: Any) -> None:
    class Actor:
        def pid(self) -> int:
            return os.getpid()

    actor = ray.remote(num_cpus=0)(Actor).remote()
    who = "rank 0 of pool `learner`"
    pid = answer(actor.pid.remote(), 60, who, "an answer")
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RunFailure) as failed:
            answer(actor.pid.remote(), 0.3, who, "an answer of the queue `q`")
    finally:
        os.kill(pid, signal.SIGKILL)
    assert failed.value.code == "RLF5019"
    assert failed.value.message == "rank 0 of pool `learner` waited 0.3 s for an answer of the queue `q`"
    with pytest.raises(ray.exceptions.RayActorError):  # that it is dead is another failure, which the driver names
        answer(actor.pid.remote(), 60, who, "an answer")


def test_weights_that_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends them hangs: training does not wait for it for ever."""
    monkeypatch.setattr(weight_channel, "ANSWER_GRACE_S", 0.1)
    hangs = threading.Event()
    links: Any = SimpleNamespace(sends=True, receives=False, run=lambda *_: hangs.wait())
    reshard: Any = SimpleNamespace(source="learner", target="rollout", model="actor")
    reading: Any = SimpleNamespace(lag=0, streamed=False, versions=lambda done, last, *more: [1])
    channel = WeightChannel(reshard, links, reading, "actor", limit_s=0.2)
    channel.start(0, 1)
    channel.published(1, dict)
    began = time.monotonic()
    with pytest.raises(RunFailure) as failed:
        channel.before_update()
    hangs.set()
    assert time.monotonic() - began < 5
    assert failed.value.code == "RLF5019"
    expected = "weights of `actor` did not get from pool `learner` to pool `rollout` within 0.2 s"
    assert failed.value.message == expected
