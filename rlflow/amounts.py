"""Bytes and times as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

GIB = 2**30


def size(count: int) -> str:
    """Bytes with three digits or so: `12.3 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def gib(count: int) -> str:
    """Bytes in GiB, whatever their number, so that sizes of one message compare at sight: `56.6 GiB`."""
    return f"{count / GIB:.1f} GiB"


def whole_us(seconds: Fraction) -> int:
    """Exact seconds in whole microseconds, as decisions and plans keep them."""
    return round(seconds * 1_000_000)


def seconds(us: int) -> str:
    """Microseconds as a person reads them: `18.6 min`, `3.20 s`, `41 ms`."""
    if us >= 600_000_000:
        return f"{us / 60e6:.1f} min"
    if us >= 1_000_000:
        return f"{us / 1e6:.3g} s"
    return f"{us / 1000:.3g} ms"
