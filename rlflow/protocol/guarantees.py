"""What a rule promises about the age of a sample, in numbers and words."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from rlflow.protocol.rule_names import RuleName, check_trigger
from rlflow.protocol.trigger import Trigger
from rlflow.values import dataclass

Kind = Literal["per sample", "aggregate"]


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Of a rule with its modifiers."""

    kind: Kind
    """`per sample`: no sample is older than `worst_age`. `aggregate`: only the number of samples ahead is bounded."""
    worst_age: int | None
    """In steps; None: no bound."""
    drops_data: bool
    deterministic_order: bool
    """Whether the samples of every step follow from the order of admission alone, so that a run can be repeated."""
    biased: bool
    """Whether long samples are less likely to be trained on than short ones."""
    live: bool
    """Whether every step can get its batch."""
    words: str
    """Why, for people."""


def carry_age(bound: int, batch: int, least: int) -> int:
    """Worst age where (bound + 1) * batch samples are out and each step takes at least `least`, the most urgent first.

    ceil((bound + 1) * batch / least) - 1, in steps: what is out at the birth of a sample needs so many steps. Tight.
    """
    return -(-(bound + 1) * batch // least) - 1


def guarantee(
    rule: RuleName,
    *,
    bound: int,
    batch: int,
    group: int = 1,
    burst: int = 1,
    trigger: Trigger | None = None,
    oldest_first: bool | None = None,
    cohorts_fit: bool = False,
    longest: Fraction | int | None = None,
    shortest_step: Fraction | int | None = None,
) -> Guarantee:
    """The guarantee of `rule` with this bound (steps), batch and group (samples), burst (versions) and trigger.

    `cohorts_fit`: every version admits at most one batch (no burst at the start), which makes `wait` with oldest first
    hard. `longest` and `shortest_step`, in one unit of time: the longest life of a sample from its first token to its
    end, and the least time between two versions; they bound `count`. Raises ValueError for sizes that make no sense.
    """
    if bound < 0 or group < 1 or batch < group or batch % group or burst < 1:
        raise ValueError(f"bound {bound}, batch {batch}, group {group}, burst {burst}: batch must be whole groups")
    trigger = trigger or Trigger()
    check_trigger(rule, trigger)
    live = burst <= bound + 1
    least = trigger.least(batch, group)
    carried = carry_age(bound, batch, least)
    why = [] if live else [f"a burst of {burst} leaves a step without samples: at most bound + 1 = {bound + 1} is live"]
    if trigger.carries:
        why.append(f"{(bound + 1) * batch} samples are out and a step may take only {least} of {batch}")

    def made(worst: int | None, words: str, *, drops: bool = False, ordered: bool = False) -> Guarantee:
        kind: Kind = "aggregate" if worst is None else "per sample"
        return Guarantee(kind, worst, drops, ordered, drops, live, "; ".join([words, *why]))

    match rule:
        case "in_order" if not trigger.carries:
            return made(bound, f"sample n trains at step ceil(n / {batch}) - 1, as the gate counted", ordered=True)
        case "in_order" | "slack_edf":
            how = "carried samples leave the order of admission, so as slack_edf: " if rule == "in_order" else ""
            return made(carried, f"{how}every step takes what is due, for all deadlines")
        case "wait" if oldest_first is not False:
            if cohorts_fit and burst == 1 and not trigger.carries:
                return made(bound, "every cohort fits into the step at which it is due")
            worst = max(bound, bound + carried - 1)
            return made(worst, f"a sample is finished {bound} steps after its birth and then waits for the older ones")
        case "wait":
            worst = bound + carried
            return made(worst, f"a sample is finished {bound} steps after its birth and then waits for what arrived")
        case "evict":
            return made(bound, "older samples are dropped: long samples are trained on less often", drops=True)
        case "count":
            words = "the first finished are taken: a long sample is passed by any number of steps"
            if longest is None or shortest_step is None:
                return made(None, words)
            if longest < 0 or shortest_step <= 0:
                raise ValueError(f"the longest sample takes {longest}, a step {shortest_step}: must be positive")
            worst = int(Fraction(longest) // Fraction(shortest_step)) + 1 + carried
            return made(worst, f"at most {worst - carried} versions while it runs, then {carried} in the queue")
    raise ValueError(f"no rule `{rule}`: in_order, slack_edf, wait, evict, count")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a guarantee stays within what the flow permits, and what would."""

    allowed: bool
    guarantee: Guarantee
    permitted: int
    nearest_share: Fraction | None = None
    """The least trigger, at or above the one asked for, that is legal with the bound; None: none, or not needed."""
    nearest_bound: int | None = None
    """The greatest bound, below the one asked for, that is legal with the trigger; None: none, or not needed."""


def check(
    rule: RuleName,
    *,
    permitted: int,
    bound: int,
    batch: int,
    group: int = 1,
    burst: int = 1,
    trigger: Trigger | None = None,
    oldest_first: bool | None = None,
    cohorts_fit: bool = False,
) -> Verdict:
    """Compares the worst age with the `permitted` one (steps) and finds the nearest legal trigger and bound."""
    asked = trigger or Trigger()

    def at(bound: int, groups: int | None = None) -> Guarantee:
        share = asked if groups is None else Trigger(Fraction(groups * group, batch), asked.carry, asked.same_batch)
        return guarantee(
            rule,
            bound=bound,
            batch=batch,
            group=group,
            burst=burst,
            trigger=share,
            oldest_first=oldest_first,
            cohorts_fit=cohorts_fit,
        )

    def legal(made: Guarantee) -> bool:
        return made.worst_age is not None and made.worst_age <= permitted and made.live

    found = at(bound)
    if legal(found):
        return Verdict(True, found, permitted)
    least = asked.start(batch, group) // group
    # A larger share or a smaller bound never makes a sample older: the first legal one on the way is the nearest.
    shares = range(least, batch // group + 1) if legal(at(bound, batch // group)) else range(0)
    low, high = least, batch // group
    while shares and low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if legal(at(bound, middle)) else (middle + 1, high)
    share = Fraction(low * group, batch) if shares and asked.carries else None
    return Verdict(False, found, permitted, share, next((s for s in range(bound - 1, -1, -1) if legal(at(s))), None))
