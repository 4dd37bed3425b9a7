"""Weights between a pool that trains and one that reads, under every lag; stops; and peers that are lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlflow.backends.ray_runtime.deliveries import Reading
from rlflow.ir.flow import Layout
from rlflow.plan import Evaluation
from tests.unit.ray_runtime import channel_jobs as jobs
from tests.unit.ray_runtime.parallel.workers import Workers, started

STEPS = 5


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(2) as found:
        yield found


@pytest.mark.parametrize(("lag", "every"), [(0, 0), (1, 0), (2, 0), (3, 0), (1, 2), (2, 1)])
def test_every_step_reads_the_version_of_its_staleness_whole(workers: Workers, lag: int, every: int) -> None:
    """The trainer overwrites its weights as soon as it may, and the reader is late: a version that changed while it
    was on its way has two numbers in it."""
    _, reader = workers.run(jobs.run, lag, every, STEPS, STEPS, ranks=2)
    evaluations = (Evaluation(name="held", every=every, instructions=()),) if every else ()
    reading = Reading(True, lag, evaluations)
    assert reader.versions == reading.versions(0, STEPS)
    for step, values in reader.values.items():
        evaluated = [done for done in range(1, step) if every and done % every == 0]
        assert values == [float(max([reading.of_step(step), *evaluated]))], step


def test_an_update_waits_for_the_version_before_to_leave(workers: Workers) -> None:
    trainer, reader = workers.run(jobs.run, 1, 0, STEPS, STEPS, ranks=2)
    assert reader.versions == [1, 2, 3]
    for version in reader.versions:
        assert trainer.updated[version + 1] > reader.received[version]


def test_with_a_lag_of_two_the_trainer_goes_on(workers: Workers) -> None:
    """What is on its way is a copy, so that nothing waits for it."""
    trainer, reader = workers.run(jobs.run, 2, 0, STEPS, STEPS, ranks=2)
    assert reader.versions == [1, 2]
    for version in reader.versions:
        assert trainer.updated[version + 1] < reader.received[version]


@pytest.mark.parametrize(("lag", "left"), [(0, [3]), (1, [2, 3]), (2, [1, 2, 3])])
def test_an_early_stop_leaves_nobody_waiting(workers: Workers, lag: int, left: list[int]) -> None:
    trainer, reader = workers.run(jobs.run, lag, 0, 9, 3, ranks=2)
    assert reader.versions[-len(left) :] == left
    assert trainer.threads == reader.threads == 0


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize(("lost", "lag"), [(jobs.TRAINER, 1), (jobs.READER, 1), (jobs.READER, 2)])
def test_a_lost_peer_is_told_with_pools_and_version(lost: int, lag: int, how: str) -> None:
    with started(2) as workers:
        for pipe in workers._pipes:
            pipe.send((jobs.peer_is_lost, (lost, how, lag)))
        answer = workers._pipes[1 - lost]
        assert answer.poll(20), "it waits for ever"
        log, error = answer.recv()
    assert error is None, error
    code, message, seconds = log.failure
    assert code == "RLF5006"
    assert message == "version 1 of `actor` did not get from pool `learners` to pool `samplers`"
    assert seconds < 1.0 + 1.5, "the group's timeout, and some"
    assert log.threads == 0


def test_every_rank_that_trains_hears_of_a_reader_that_died() -> None:
    trained = Layout(tp=2, pp=2)  # every rank has a part that no other has
    with started(trained.size + 1) as workers:
        for pipe in workers._pipes:
            pipe.send((jobs.reader_is_lost, (trained,)))
        answers = workers._pipes[: trained.size]
        assert all(answer.poll(20) for answer in answers), "one waits for ever"
        found = [answer.recv() for answer in answers]
    assert [error for _, error in found] == [None] * trained.size
    for log, _ in found:
        code, message, seconds = log.failure
        assert (code, log.threads) == ("RLF5006", 0)
        assert message == "version 1 of `actor` did not get from pool `learners` to pool `samplers`"
        assert seconds < 1.0 + 1.5, "the group's timeout, and some"
