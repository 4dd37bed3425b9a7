"""Staged waking of an engine: the order of allocations and releases with the least peak.

The peak of a switch between training and generation depends on the order of its operations. Finding the best order is a
bottleneck shortest path over sets of operations done; the sets are few, so it is solved exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.values import dataclass

MAX_OPS = 20
"""Operations that are ordered exactly: a million sets at most."""


@dataclass(frozen=True, slots=True)
class WakeOp:
    """One operation: it allocates, works with `scratch_bytes` more, then releases. `after`: what must precede it."""

    name: str
    allocates: int = 0
    releases: int = 0
    scratch_bytes: int = 0
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WakeStep:
    """Bytes on the device while an operation runs, and after it."""

    op: WakeOp
    peak_bytes: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class WakeOrder:
    """Operations in their order, with the greatest bytes on the device from the start on."""

    steps: tuple[WakeStep, ...]
    peak_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.op.name for step in self.steps)


@dataclass(frozen=True, slots=True)
class WakeOverflow:
    """The order does not fit: the first operation that exceeds the device, and the peak of the whole order."""

    op: str
    bytes: int
    missing_bytes: int
    order: WakeOrder


@dataclass(frozen=True, slots=True)
class WakeMisordered:
    """An operation comes before one that it must follow."""

    op: str
    missing: tuple[str, ...]


def check_order(
    ops: Sequence[WakeOp], names: Sequence[str], held_bytes: int, hbm_bytes: int
) -> WakeOrder | WakeOverflow | WakeMisordered:
    """Walk a given order, starting with `held_bytes` on the device. ValueError unless it names every operation once."""
    by_name = _by_name(ops)
    if sorted(names) != sorted(by_name):
        raise ValueError("an order names every operation exactly once")
    for position, name in enumerate(names):
        missing = tuple(other for other in by_name[name].after if other not in names[:position])
        if missing:
            return WakeMisordered(name, missing)
    order = _walk([by_name[name] for name in names], held_bytes)
    if held_bytes > hbm_bytes:
        return WakeOverflow(names[0] if names else "", held_bytes, held_bytes - hbm_bytes, order)
    for step in order.steps:
        if step.peak_bytes > hbm_bytes:
            return WakeOverflow(step.op.name, step.peak_bytes, step.peak_bytes - hbm_bytes, order)
    return order


def best_order(ops: Sequence[WakeOp], held_bytes: int) -> WakeOrder:
    """The order with the least peak; of several, the one that keeps closest to the order of `ops`.

    ValueError for unknown or circular `after`, for more than MAX_OPS operations, and where more is released than held.
    """
    by_name = _by_name(ops)
    if len(ops) > MAX_OPS:
        raise ValueError(f"{len(ops)} operations; at most {MAX_OPS} are ordered exactly")
    number = {name: position for position, name in enumerate(by_name)}
    needs = [sum(1 << number[other] for other in set(op.after)) for op in ops]
    change = [op.allocates - op.releases for op in ops]
    above = [op.allocates + op.scratch_bytes for op in ops]
    everything = (1 << len(ops)) - 1

    # Least peak from a set of operations done to the end, over the sets that dependencies allow. Larger sets first.
    held = {0: held_bytes}
    layers = [[0]]
    for _ in ops:
        following: dict[int, None] = {}
        for done in layers[-1]:
            for i in range(len(ops)):
                if not done >> i & 1 and needs[i] & ~done == 0:
                    held.setdefault(done | 1 << i, held[done] + change[i])
                    following[done | 1 << i] = None
        layers.append(list(following))
    if not layers[-1]:
        raise ValueError("the operations wait for each other in a circle")
    least = {everything: 0}
    for layer in reversed(layers[:-1]):
        for done in layer:
            options = (
                max(held[done] + above[i], held[done | 1 << i], least[done | 1 << i])
                for i in range(len(ops))
                if not done >> i & 1 and needs[i] & ~done == 0 and done | 1 << i in least
            )
            peak = min(options, default=None)
            if peak is not None:
                least[done] = peak

    chosen, done = [], 0
    while done != everything:
        i = next(
            i
            for i in range(len(ops))
            if not done >> i & 1
            and needs[i] & ~done == 0
            and max(held[done] + above[i], least.get(done | 1 << i, least[0] + 1)) <= least[0]
        )
        chosen.append(ops[i])
        done |= 1 << i
    return _walk(chosen, held_bytes)


def _by_name(ops: Sequence[WakeOp]) -> dict[str, WakeOp]:
    by_name = {op.name: op for op in ops}
    if len(by_name) != len(ops):
        raise ValueError("operations need different names")
    for op in ops:
        unknown = [other for other in op.after if other not in by_name]
        if unknown:
            raise ValueError(f"{op.name} comes after unknown operations: {', '.join(unknown)}")
        if min(op.allocates, op.releases, op.scratch_bytes) < 0:
            raise ValueError(f"{op.name}: bytes are not negative")
    return by_name


def _walk(ops: Sequence[WakeOp], held_bytes: int) -> WakeOrder:
    steps, held = [], held_bytes
    for op in ops:
        peak = held + op.allocates + op.scratch_bytes
        held += op.allocates - op.releases
        if held < 0:
            raise ValueError(f"{op.name} releases more than there is")
        steps.append(WakeStep(op, peak, held))
    return WakeOrder(tuple(steps), max([held_bytes, *(step.peak_bytes for step in steps)]))


def engine_wake(gathered_bytes: int, engine_bytes: int, kv_bytes: int, buffer_bytes: int = 0) -> tuple[WakeOp, ...]:
    """The operations that bring an engine back with new weights: the gathered copy is held already, and is freed once
    the engine has loaded it. `buffer_bytes` is what loading itself needs beside both copies."""
    return (
        WakeOp("wake weights", allocates=engine_bytes),
        WakeOp("load weights", scratch_bytes=buffer_bytes, after=("wake weights",)),
        WakeOp("free gathered", releases=gathered_bytes, after=("load weights",)),
        WakeOp("wake kv", allocates=kv_bytes),
    )
