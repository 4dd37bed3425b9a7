"""What is found out about a rank that died."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.backends.ray_runtime.place import Identity, PlaceNote
from rlflow.backends.ray_runtime.start_ranks import StartedRank
from rlflow.backends.ray_runtime.teardown import death_facts

pytestmark = pytest.mark.ray


class OneAnswer:
    """A method of an actor that gives a value."""

    def __init__(self, value: Any, ray: Any) -> None:
        self._value, self._ray = value, ray

    def options(self, **_: object) -> OneAnswer:
        return self

    def remote(self) -> Any:
        return self._ray.put(self._value)


@pytest.mark.parametrize("other", [True, False])
def test_a_rank_on_another_host_asks_one_that_is_left_there(ray_cluster: Any, other: bool) -> None:
    node = ray_cluster.get_runtime_context().get_node_id()

    def rank(number: int) -> StartedRank:
        actor = SimpleNamespace(where=OneAnswer(PlaceNote().read(), ray_cluster))
        return StartedRank("learner", number, actor, ray_cluster.put(Identity("another", node, 70 + number)))

    dead = rank(1)
    facts = death_facts(dead, [dead, *([rank(0)] if other else [])])
    assert facts[0] == "it was process 71 on host another"
    assert bool(facts[1:]) is other
    assert all(re.fullmatch(r"memory that is free on that host now: [0-9.]+ [KMGT]?i?B", fact) for fact in facts[1:])
