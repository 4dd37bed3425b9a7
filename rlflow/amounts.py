"""Bytes and times as people read them."""

from __future__ import annotations

GIB = 2**30


def size(count: int) -> str:
    """Bytes with three digits or so: `12.3 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def seconds(us: int) -> str:
    """Microseconds as a person reads them: `18.6 min`, `3.20 s`, `41 ms`."""
    if us >= 600_000_000:
        return f"{us / 60e6:.1f} min"
    if us >= 1_000_000:
        return f"{us / 1e6:.3g} s"
    return f"{us / 1000:.3g} ms"
