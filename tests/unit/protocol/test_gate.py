"""The count gate: numbers of the field report, a second formula, changes and rollbacks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.protocol.batches import BatchSizes
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.gate import CountGate


def gate(batch: int = 8, bound: int = 2, **more: int) -> CountGate:
    return CountGate(bound, BatchSizes.constant(batch), **more)


@pytest.mark.parametrize("version", [0, 50, 1000])
def test_a_resumed_gate_has_the_capacity_of_a_new_one(version: int) -> None:
    resumed = gate(version=version)
    assert resumed.capacity == 24
    assert resumed.accepted == version * 8


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.lists(st.sampled_from("apr"), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_sample_n_enters_only_if_n_is_within_the_coming_batches(
    bound: int, groups: int, group: int, burst: int, moves: list[str]
) -> None:
    """Against the formula on the sample's own number, counted here."""
    batch = groups * group
    g = CountGate(bound, BatchSizes.constant(batch), group, burst)
    accepted = version = 0
    for move in moves:
        limit = (version // burst * burst + bound + 1) * batch
        if move == "a":
            if accepted + group <= limit:
                assert g.admit(group) == version
                accepted += group
            else:
                with pytest.raises(ProtocolError):
                    g.admit(group)
        elif move == "r" and accepted - version * batch >= group:
            g.refund(group)
            accepted -= group
        elif move == "p" and accepted >= (version + 1) * batch:
            version += 1
            g.publish(version, batch)
        assert (g.accepted, g.version) == (accepted, version)
        assert g.capacity == max(0, (version // burst * burst + bound + 1) * batch - accepted) // group * group


def test_areals_form_is_the_same() -> None:
    for bound in range(4):
        for version in range(4):
            g = gate(batch=3, bound=bound, version=version)
            while g.capacity:
                g.admit(1)
            n = g.accepted
            assert (n - 1) // 3 <= version + bound < n // 3


def test_groups_are_admitted_whole() -> None:
    g = gate(batch=8, bound=0, group=4)
    g.admit(4)
    with pytest.raises(ProtocolError, match="whole groups of 4"):
        g.admit(2)
    g.held += 1  # three places left: no group fits
    assert g.capacity == 0


@pytest.mark.parametrize(("batch", "near"), [(10, "8 or 12"), (3, "take 4")])
def test_a_batch_that_cuts_a_group_is_refused_with_the_nearest(batch: int, near: str) -> None:
    with pytest.raises(ValueError, match=near):
        gate(batch=batch, group=4)


def test_refunds_are_given_once() -> None:
    g = gate()
    g.admit(8)
    g.refund(8)
    with pytest.raises(ProtocolError):
        g.refund(1)
    assert g.capacity == 24


def test_an_older_version_is_refused_unless_a_rollback_is_declared() -> None:
    g = gate(version=40)
    for version in (0, 39, 40):
        with pytest.raises(ProtocolError, match="rollback"):
            g.publish(version, 0)
        assert g.version == 40
    g.publish(0, 0, rollback=True)
    assert g.version == 0


def test_a_lower_bound_lets_nothing_in_until_the_samples_fit() -> None:
    g = gate(batch=4, bound=3)
    g.admit(16)
    g.change_bound(1)
    assert (g.free, g.capacity) == (-8, 0)
    for version in (1, 2):
        g.publish(version, 4)
        assert g.capacity == 0
    g.publish(3, 4)
    assert g.capacity == 4


def test_changing_the_batch_counts_the_coming_batches() -> None:
    g = gate(batch=4, bound=1)
    assert g.change_batch(6) == 2  # steps 0 and 1 keep 4
    assert g.window == 8
    g.publish(1, 0)
    assert g.window == 4 + 6
    g.publish(2, 0)
    assert (g.window, g.accepted) == (12, 8)
    with pytest.raises(ValueError, match="step 1 is trained"):
        g.change_batch(8, from_step=1)


@pytest.mark.parametrize(("burst", "bound", "live"), [(1, 0, True), (2, 0, False), (3, 2, True), (4, 2, False)])
def test_a_burst_is_live_up_to_the_bound_and_one(burst: int, bound: int, live: bool) -> None:
    g = gate(batch=5, bound=bound, burst=burst)
    assert g.live is live
    # By counting: the least that may be admitted beyond the trained batches, over one burst of versions.
    least = min((v // burst * burst + bound + 1) * 5 - v * 5 for v in range(burst))
    assert live is (least >= 5)


def test_json() -> None:
    g = gate(batch=8, bound=2, group=2, burst=3, version=7)
    g.admit(4)
    g.change_batch(12)
    back = CountGate.from_json(json.loads(json.dumps(g.to_json())))
    assert back == g


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=5), st.integers(0, 25), st.integers(-1, 25))
def test_sums_of_batches(changes: list[tuple[int, int]], first: int, last: int) -> None:
    sizes, plain = BatchSizes.constant(3), [3] * 40
    for start, batch in changes:
        sizes = sizes.changed(batch, start)
        plain[start:] = [batch] * (40 - start)
    assert [sizes.at(step) for step in range(40)] == plain
    assert sizes.total(first, last) == sum(plain[first : last + 1])
    assert sizes.total(first, last, lambda batch: batch * batch) == sum(b * b for b in plain[first : last + 1])


@pytest.mark.parametrize("parts", [((), ()), ((1,), (2,)), ((0, 0), (1, 1)), ((0,), (0,)), ((0, 1), (1,))])
def test_malformed_sizes(parts: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"batch|steps"):
        BatchSizes(*parts)
