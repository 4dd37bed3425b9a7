"""The names of the consumption rules, apart from the rules: what a compiler needs of them loads fast."""

from __future__ import annotations

from typing import Literal

from rlflow.protocol.trigger import Trigger

RuleName = Literal["in_order", "slack_edf", "wait", "count", "evict"]


def check_trigger(name: RuleName, trigger: Trigger) -> None:
    """Raises ValueError where the rule cannot have that trigger."""
    if trigger.same_batch and name in ("wait", "evict"):
        raise ValueError(f"`{name}` knows its batch only when that is finished: start early with in_order or slack_edf")
