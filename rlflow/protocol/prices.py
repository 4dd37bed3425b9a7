"""What a bound costs: least periods without dropping data, and the lag of several updates per batch."""

from __future__ import annotations

from fractions import Fraction

Time = Fraction | int


def least_period(
    longest: Time, train: Time, sync: Time, *, worst_age: int, burst: int = 1, waits_for_sync: bool = True
) -> Fraction:
    """Least mean time per step, in the unit of the three times, where no sample is dropped or older than `worst_age`.

    Premise: something is admitted at every version that is a multiple of `burst`, each time with one sample that takes
    `longest` or more. Such a sample ends at X_v + longest at the earliest and must be in step v + worst_age or before,
    whose version is published train + sync later. The next burst that comes after that is w = burst * ceil((worst_age +
    1) / burst) versions on, and the steps in between take at least T each: (longest + (w - worst_age) * T) / w, never
    below T. With T = train + sync where the trainer waits for the sync, else T = train and sync is added once to
    `longest`. For burst 1 that is (longest + train + sync) / (worst_age + 1).
    """
    if min(longest, train, sync) < 0 or worst_age < 0 or burst < 1:
        raise ValueError(f"times {longest}, {train}, {sync}, age {worst_age}, burst {burst}")
    step = Fraction(train + sync if waits_for_sync else train)
    last = Fraction(longest if waits_for_sync else longest + sync)
    w = burst * -(-(worst_age + 1) // burst)
    return max(step, (last + (w - worst_age) * step) / w)


def best_burst(longest: Time, train: Time, sync: Time, *, bound: int, waits_for_sync: bool = True) -> int:
    """The live burst (1 to bound + 1) of the least price; of equals the smallest. A burst is a larger cohort, so its
    longest sample is longer: compare the prices with that where the difference is small."""

    def price(burst: int) -> Fraction:
        return least_period(longest, train, sync, worst_age=bound, burst=burst, waits_for_sync=waits_for_sync)

    return min(range(1, bound + 2), key=lambda burst: (price(burst), burst))


def update_lag(updates: int, depth: int) -> int:
    """Lag in optimizer updates where each batch gets `updates` of them and generation is `depth` batches ahead.

    The last mini-batch of a batch is trained `updates` - 1 updates after the first: updates * depth + updates - 1.
    """
    if updates < 1 or depth < 0:
        raise ValueError(f"{updates} updates a batch must be at least 1, a depth of {depth} batches not negative")
    return updates * depth + updates - 1
