"""What the pools of a run agree on."""

from __future__ import annotations

from rlflow.backends.ray_runtime.run_control import RunControl


def test_all_pools_end_after_the_same_step() -> None:
    control = RunControl(parts=2)
    assert control.begin(1)
    assert control.begin(2), "the pool that is ahead"
    control.stop()
    assert not control.begin(3)
    assert control.begin(2), "the pool that is behind goes on to it"
    assert [control.saved(2), control.saved(2)] == [False, True]
