"""Coordinates and process groups of a layout, among real processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from rlflow.backends.ray_runtime.parallel.mesh import Place, make_mesh
from rlflow.ir.flow import Layout
from tests.unit.ray_runtime.parallel import jobs
from tests.unit.ray_runtime.parallel.workers import Workers, started


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(4) as found:
        yield found


def test_places_are_those_of_reshard() -> None:
    layout = Layout(dp=2, tp=3, pp=2, cp=2, ep=2, etp=3)
    assert Place.of(layout, 0) == Place(0, 0, 0, 0, 0, 0, 0)
    assert Place.of(layout, 17) == Place(pp=1, dp=0, cp=1, tp=2, expert_replica=0, ep=1, etp=2)
    assert Place.of(layout, 23) == Place(pp=1, dp=1, cp=1, tp=2, expert_replica=1, ep=1, etp=2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_groups_connect_the_ranks_of_an_axis_in_order(workers: Workers, order: tuple[int, ...]) -> None:
    found = workers.run(jobs.mesh_members, Layout(dp=2, tp=2, ep=4), order, ranks=4)
    by_place = {place: found[rank] for place, rank in enumerate(order)}
    assert by_place[1]["tp"] == [0, 1]
    assert by_place[1]["dp"] == [1, 3]
    assert by_place[1]["ep"] == [0, 1, 2, 3]
    assert by_place[2]["replica"] == [2, 3]
    assert by_place[2]["world"] == [0, 1, 2, 3]
    assert not {"pp", "cp", "etp", "expert_dp", "ends"} & set(by_place[0])


def test_pipeline_groups(workers: Workers) -> None:
    found = workers.run(jobs.mesh_members, Layout(pp=2, dp=2), (0, 1, 2, 3), ranks=4)
    assert found[3]["pp"] == found[3]["ends"] == found[3]["replica"] == [1, 3]
    assert found[3]["dp"] == found[3]["stage"] == [2, 3]
    middle = workers.run(jobs.mesh_members, Layout(pp=4), (0, 1, 2, 3), ranks=4)
    assert [group.get("ends") for group in middle] == [[0, 3], [1, 2], [1, 2], [0, 3]]


def test_members_may_have_made_other_groups_before(workers: Workers) -> None:
    assert workers.run(jobs.unlike_pasts, Layout(dp=4), ranks=4) == [6] * 4


def test_a_mesh_of_one_needs_no_processes() -> None:
    mesh = make_mesh(Layout(), (5,), timeout=timedelta(seconds=1))
    assert mesh.rank == 0
    assert all(getattr(mesh, axis) is None for axis in jobs.AXES)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="the layout has 4 ranks, 2 were given"):
        make_mesh(Layout(dp=4), (0, 1), timeout=timedelta(seconds=1))
