"""When requests that advance together take blocks of the cache.

`phases[p]` of them take their next block at the offsets that leave p modulo the tokens of a block: each one in every
round of so many steps.
"""

from __future__ import annotations

from collections.abc import Sequence


def taken(phases: Sequence[int], requests: int, offset: int, steps: int) -> int:
    """Blocks that the requests take in the steps after `offset`."""
    rounds, rest = divmod(steps, len(phases))
    low = (offset + 1) % len(phases)
    high = low + rest
    blocks = requests * rounds + sum(phases[low:high])
    return blocks + sum(phases[: high - len(phases)]) if high > len(phases) else blocks


def steps_to_exceed(phases: Sequence[int], requests: int, offset: int, free: int) -> int:
    """The first number of steps after `offset` that takes more than `free` blocks."""
    rounds = free // requests
    steps, blocks = rounds * len(phases), rounds * requests
    while blocks <= free:
        steps += 1
        blocks += phases[(offset + steps) % len(phases)]
    return steps
