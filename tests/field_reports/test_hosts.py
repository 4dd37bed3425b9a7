"""Group B of the field reports (pools, placement, devices), the part about hosts, and T3: the CPUs that a plan asks for."""

from __future__ import annotations

from typing import Any

import pytest

TWO_POOLS = """pool rollout = 4 devices pool learner = 4 devices
  place actor.generate on rollout place actor.train on learner
  place exact on cpu with workers = {workers}"""


def one_host(cpus: int, devices: int = 8) -> str:
    return f"host = {devices} * ascend_910b {{ memory = 1.5 TiB, cpus = {cpus} }}"


@pytest.mark.parametrize("workers", [1, 15, 16])
def test_B1_the_sum_of_a_host(workers: int, place_: Any) -> None:
    """8 ranks, 2 queues, the driver and the Python workers: 11 + 15 = 26 CPUs, as in T3, of 16 or of 26."""
    schedule = TWO_POOLS.format(workers=workers)
    result = place_(schedule, cluster=one_host(16))
    fits = workers <= 5
    assert result.codes == ([] if fits else ["RLF2009"])
    if not fits:
        assert (
            f"{workers} Python workers ask for {workers} CPUs, and the hosts of cluster `pod` have 5 left"
            in result.words
        )
        assert "`host`: 16 CPUs, 8 ranks x 1 + 2 queues x 1 + driver 1 = 11 asked for, 5 left" in result.words
        assert f"in all {11 + workers} > 16" in result.words
        assert f"at most `workers = 5`, or hosts of at least `cpus = {11 + workers}`" in result.words
        assert result.places == [f"workers = {workers}"]
    assert place_(schedule, cluster=one_host(11 + workers)).codes == []


def test_B1_ranks_alone_are_too_many(place_: Any) -> None:
    result = place_(TWO_POOLS.format(workers=1), cluster=one_host(8))
    assert result.codes == ["RLF2009"]
    assert "the plan asks for 11 CPUs of host `host`, which has 8" in result.words
    assert "8 ranks x 1 + 2 queues x 1 + driver 1 = 11 > 8" in result.words
    assert "hosts of at least `cpus = 12`, or pools with at most 5 of its devices" in result.words


def test_B1_environments_are_counted(place_: Any, tmp_path: Any) -> None:
    """Every rank that generates runs each environment in a process of its own: 8 + 8 + the driver, and a worker."""
    (tmp_path / "games.py").write_text("class Guess:\n    pass\n", "utf-8")
    sizes = {
        "declare": 'environment game = python("games:Guess")',
        "sampling": ", environment = game, turns = 2",
    }
    assert place_("pool main = 8 devices", cluster=one_host(18), **sizes).codes == []
    result = place_("pool main = 8 devices", cluster=one_host(16), **sizes)
    assert result.codes == ["RLF2009"]
    assert "8 ranks x 1 + 8 environment workers x 1 + driver 1 = 17 > 16" in result.words
    assert "pools with at most 7 of its devices" in result.words
    assert (
        "1 Python worker asks for 1 CPU, and the hosts of cluster `pod` have 0 left"
        in place_("pool main = 8 devices", cluster=one_host(17), **sizes).words
    )


def test_B1_nothing_is_said_of_hosts_whose_cpus_are_not_given(place_: Any) -> None:
    assert place_(TWO_POOLS.format(workers=500), cluster="host = 8 * ascend_910b { memory = 1.5 TiB }").codes == []


def test_B4_the_total_fits_and_no_host_does(place_: Any) -> None:
    """68 CPUs in all, 11 asked for; the host that has the devices has 4."""
    cluster = "a = 8 * ascend_910b { memory = 1.5 TiB, cpus = 4 } b = 1 * ascend_910b { memory = 1.5 TiB, cpus = 64 }"
    result = place_("pool main = 8 devices", cluster=cluster)
    assert result.codes == ["RLF2009"]
    assert "the plan asks for 9 CPUs of host `a`, which has 4" in result.words
    assert "8 ranks x 1 + driver 1 = 9 > 4" in result.words
    assert "pools with at most 3 of its devices" in result.words
    workers = place_(
        "pool main = 8 devices place exact on cpu with workers = 20", cluster=cluster.replace("4 }", "12 }", 1)
    )
    hosts = workers.flow.pools["cpu"].host_of_rank
    assert (hosts.count("a"), hosts.count("b")) == (3, 17), "what host a has left, and the rest elsewhere"


def test_B5_pools_do_not_overlap(place_: Any) -> None:
    """Two pools of 6 devices do not share 4 of 8; stages that take turns are on one pool, with swaps between them."""
    both = "pool one = 6 devices pool two = 6 devices place actor.generate on one place actor.train on two"
    result = place_(both, cluster=one_host(64), prompts=48)
    assert result.codes == ["RLF2003"]
    assert "2 pools want 12 devices, and cluster `pod` has 8" in result.words
    assert "wanted: `one` 6, `two` 6" in result.words
    shared = place_(
        "pool main = 8 devices place actor.generate on main with tp = 2 place actor.train on main with tp = 4",
        cluster=one_host(64),
    )
    (program,) = shared.plan.programs
    ids = [instruction.id for instruction in program.step]
    assert ids.index("drop:samples keys and values") < ids.index("run:actor.train")
    assert "drop:actor rollout weights" in ids


def test_B6_more_engines_than_the_pool_holds(place_: Any) -> None:
    """3 engines of tp 2 are 6 devices of a pool of 5."""
    schedule = "pool rollout = {} devices pool learner = 6 devices place actor.generate on rollout with dp = 3, tp = 2 place actor.train on learner"
    result = place_(schedule.format(5), prompts=6)
    assert result.codes == ["RLF2001"]
    assert "pool `rollout` of 5 devices does not divide into tp 2" in result.words
    assert place_(schedule.format(6), prompts=6).codes == []
    seven = place_(schedule.format(8), prompts=6)
    assert "`dp = 3` does not fill pool `rollout` of 8 devices with tp 2" in seven.words
    assert "`dp = 4`, or a pool of 6 devices" in seven.words


def test_B7_four_trainers_and_three_engines(place_: Any) -> None:
    """No rule ties the two numbers: 3 engines fill 3 partitions, and each of 4 trainers reads its share once."""
    schedule = (
        "pool rollout = 3 devices pool learner = 4 devices place actor.generate on rollout place actor.train on learner"
    )
    result = place_(schedule, prompts=12, n=2)
    assert result.codes == []
    queue = next(queue for queue in result.plan.queues if queue.stage == "samples")
    assert (queue.partitions, queue.reads) == (3, 4)
    refused = place_(schedule, prompts=8, n=2)
    assert set(refused.codes) == {"RLF2001"}
    assert "16 samples do not divide over the 3 data-parallel ranks of `samples`" in refused.words


def test_B13_the_same_file_gives_the_same_plan(place_: Any) -> None:
    """Searched twice, from the same text: every byte of the plan is the same, and no runner-up is there twice."""
    first, second = place_("auto"), place_("auto")
    assert first.codes == second.codes == []
    assert first.plan.to_json() == second.plan.to_json()
    search = first.plan.search
    assert search is not None
    shown = [pools for pools, _ in search.runners_up]
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("staleness", [0, 1])
def test_E8_queues_are_in_the_sum(staleness: int, place_: Any) -> None:
    """A queue between pools asks for a CPU on the first host of the pool that reads it."""
    schedule = (
        "pool rollout = 8 devices pool learner = 8 devices place actor.generate on rollout place actor.train on learner"
        f" staleness actor = {staleness} steps"
    )
    cluster = "first = 8 * ascend_910b {{ cpus = {} }} second = 8 * ascend_910b {{ cpus = {} }}"
    assert place_(schedule, cluster=cluster.format(10, 10)).codes == []
    short = place_(schedule, cluster=cluster.format(10, 9))
    assert short.codes == ["RLF2009"]
    assert "the plan asks for 10 CPUs of host `second`, which has 9" in short.words
    assert "8 ranks x 1 + 2 queues x 1 = 10 > 9" in short.words
    colocated = place_("pool main = 8 devices", cluster=cluster.format(10, 1))
    assert colocated.codes == [], "on one pool there is no queue"
