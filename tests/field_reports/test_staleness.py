"""Groups E and F of the field reports (queues, staleness) with rollout and training on pools of their own."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.ir.flow import EdgeKind

APART = "pool rollout = 8 devices pool learner = 8 devices place actor.generate on rollout place actor.train on learner"


def stale(steps: int, more: str = "") -> str:
    return f"{APART} staleness actor = {steps} step{'s' * (steps != 1)}{more}"


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_E9_the_depth_follows_from_the_bound(steps: int, place_: Any) -> None:
    """At most the bound and one batch are ever under way; a queue that is asked to hold more is refused."""
    result = place_(stale(steps))
    assert {queue.capacity for queue in result.plan.queues} == {steps + 1}
    deeper = place_(stale(steps, f", depth = {steps + 2} steps"))
    assert deeper.codes == ["RLF3003"]
    assert f"`depth = {steps + 2} steps` is more than the {steps + 1} batches" in deeper.words
    assert f"at most `depth = {steps + 1} steps`" in deeper.words
    assert place_(stale(steps, f", depth = {steps + 1} steps")).codes == []


@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 4)])
def test_E11_more_producers_than_consumers(writers: int, readers: int, place_: Any, hf_model: Any) -> None:
    """Each writes a partition of its own, and each reads its share of every batch once."""
    result = place_(
        f"pool rollout = {writers} devices pool learner = {readers} devices "
        "place actor.generate on rollout place actor.train on learner",
        model=hf_model(),
    )
    assert result.codes == []
    assert {(queue.partitions, queue.reads) for queue in result.plan.queues} == {(writers, readers)}


def test_F2_bound_0_on_two_pools_is_on_policy(place_: Any) -> None:
    """One token on the weight edge, for the first weights: the next rollout waits for the next version."""
    result = place_(stale(0))
    (edge,) = (e for e in result.flow.edges if e.kind is EdgeKind.WEIGHTS and e.dst == "samples")
    assert edge.tokens == 1
    (channel,) = result.plan.channels
    assert (channel.max_staleness, channel.stale) == (0, ())
    assert "staleness 0: every reader uses the newest version" in result.shown


@pytest.mark.parametrize(("updates", "depth", "lag"), [(4, 0, 3), (2, 1, 3), (4, 1, 7), (1, 2, 2)])
def test_F5_several_updates_a_step_add_lag(updates: int, depth: int, lag: int, place_: Any) -> None:
    """updates * depth + updates - 1, as a number of the plan; the bound counts steps and allows it."""
    result = place_(stale(depth), more=f", minibatch = {256 // updates} samples")
    assert result.codes == []
    (channel,) = result.plan.channels
    assert channel.updates == updates
    assert [reader.updates for reader in channel.stale] == [updates] * (depth > 0)
    words = f"{updates} optimizer updates a step, so that a sample is at most {lag} updates old"
    assert (words in result.shown) == (updates > 1)


def test_F5_epochs_are_updates_too(place_: Any) -> None:
    result = place_(stale(1), more=", minibatch = 128 samples, epochs = 2")
    assert "4 optimizer updates a step, so that a sample is at most 7 updates old" in result.shown


def test_F6_old_samples_need_a_correction(place_: Any) -> None:
    """An asynchronous edge and a ratio loss without behaviour log-probabilities or a truncated weight."""
    result = place_(stale(1), correction="")
    assert result.codes == ["RLF3002"]
    assert (
        "samples of `actor` may be 1 step old, and nothing in its loss (`ppo_clip`) accounts for that" in result.words
    )
    assert "with truncated_is(2.0)`" in result.words
    for correction in (" with truncated_is(2.0)", " with behaviour()"):
        assert place_(stale(1), correction=correction).codes == []
    assert place_(stale(0), correction="").codes == []


def test_F3_waiting_in_the_queue_counts(place_: Any) -> None:
    """The age is taken where a sample is trained on: with `wait` it passes the bound of 2, which 3 allow and 2 do not."""
    fine = place_(stale(2, ", admit wait"), allowed=3)
    assert fine.codes == []
    (reader,) = fine.plan.channels[0].stale
    assert (reader.steps, reader.worst_age) == (2, 3)
    result = place_(stale(2, ", admit wait"), allowed=2)
    assert result.codes == ["RLF3004"]
    assert "lets a sample of `actor` be 3 steps old, and the flow permits 2" in result.words
    assert "`staleness actor = 1 step`" in result.words
