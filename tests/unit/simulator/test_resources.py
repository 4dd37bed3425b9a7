"""Links and workers: what shares them waits."""

from __future__ import annotations

from rlflow.backends.simulator.clock import Clock, Process, Time
from rlflow.backends.simulator.resources import Link, PoolLinks, Workers, transfer


def finish_times(clock: Clock, processes: dict[str, Process]) -> dict[str, Time]:
    ends: dict[str, Time] = {}

    def timed(name: str, process: Process) -> Process:
        yield from process
        ends[name] = clock.now

    for name, process in processes.items():
        clock.start(name, timed(name, process))
    assert clock.run() == ()
    return ends


def test_transfers_over_one_link_take_as_long_as_both() -> None:
    clock = Clock()
    source, first, second = (PoolLinks.of(name, clock) for name in ("s", "a", "b"))
    ends = finish_times(
        clock,
        {
            "a": transfer(clock, 10, [(source.out, 10, 100), (first.into, 10, 100)]),
            "b": transfer(clock, 10, [(source.out, 10, 100), (second.into, 10, 100)]),
        },
    )
    assert ends == {"a": 10, "b": 20}
    assert source.out.bytes == 200
    assert first.into.bytes == 100


def test_a_link_that_is_held_shortly_is_free_for_the_next() -> None:
    """A sender that moves a third of what the receiver gets is busy for a third of the time."""
    clock = Clock()
    source, first, second = (PoolLinks.of(name, clock) for name in ("s", "a", "b"))
    ends = finish_times(
        clock,
        {
            "a": transfer(clock, 9, [(source.out, 3, 30), (first.into, 9, 90)]),
            "b": transfer(clock, 9, [(source.out, 3, 30), (second.into, 9, 90)]),
        },
    )
    assert ends == {"a": 9, "b": 12}


def test_directions_do_not_share() -> None:
    clock = Clock()
    links = PoolLinks.of("p", clock)
    ends = finish_times(
        clock, {"out": transfer(clock, 5, [(links.to_host, 5, 1)]), "in": transfer(clock, 7, [(links.from_host, 7, 1)])}
    )
    assert ends == {"out": 5, "in": 7}


def test_a_copy_that_is_waited_for_goes_first() -> None:
    clock = Clock()
    link = Link("l", clock)
    assert link.hold(10, 5) == 10
    link.interrupt(3, 2)
    assert link.free_at == 13
    assert link.bytes == 7


def test_calls_of_python_functions_queue_for_their_workers() -> None:
    clock = Clock()
    workers = Workers("cpu", clock)
    assert finish_times(clock, {"a": workers.call(4), "b": workers.call(2), "c": workers.call(0)}) == {
        "a": 4,
        "b": 6,
        "c": 6,
    }
