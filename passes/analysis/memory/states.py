"""The state of weights through sleep and wake, and of what is derived from them.

Every part (base weights, adapter, buffers such as rotary tables) is whole, only on the host, or discarded. Captured
graphs hold addresses and caches hold content of weights: both can be out of date although the weights are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from rlflow.values import dataclass


class State(Enum):
    RESIDENT = "resident"
    HOST = "host"
    """Only the host copy is valid."""
    DISCARDED = "discarded"
    """No copy is valid; what memory holds is garbage."""


class Event(Enum):
    OFFLOAD = "offload"
    """To the host: sleep that keeps a copy."""
    DISCARD = "discard"
    """Sleep that keeps nothing."""
    ONLOAD = "onload"
    """Back from the host copy; of a discarded part, memory without content."""
    LOAD = "load"
    """New content written in full, into memory that is there or made now."""
    USE = "use"


class Stale(Enum):
    """When something derived from weights becomes wrong."""

    CONTENT = "content"
    """When they are loaded anew: prefix, key-value and encoder caches."""
    ADDRESS = "address"
    """When their memory may lie elsewhere: captured graphs."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model. `derived`: it is computed from the parts in `of`, and loading it means making it again."""

    name: str
    of: tuple[str, ...] = ()
    stale: Stale | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """An event on some parts. `tag` is carried into errors."""

    event: Event
    parts: tuple[str, ...]
    tag: str = ""


class Fault(Enum):
    USED_AFTER_DISCARD = "used after discard"
    USED_ON_HOST = "used while on the host"
    SAVED_NOTHING = "offloaded after discard"
    OUT_OF_DATE = "used out of date"


@dataclass(frozen=True, slots=True)
class StateError:
    """`part` is wrong at action `at`; `cause` is the action that made it so (None: it was so from the start)."""

    fault: Fault
    part: str
    at: int
    cause: int | None
    tag: str


def check_states(parts: Sequence[Part], actions: Sequence[Action], *, cyclic: bool = True) -> tuple[StateError, ...]:
    """All faults of a sequence in which every part starts whole; cyclic: the second period is checked as well.

    Each fault is reported once per action and part, by the position of the action in `actions`. ValueError for unknown
    parts. A use of parts out of date is a fault; a load of what they are derived from is not, since they may be made
    again (an invalidation of a cache, a new capture of a graph, both `LOAD` of the derived part) before they are used.
    """
    known = {part.name: part for part in parts}
    for name in (*(n for part in parts for n in part.of), *(n for action in actions for n in action.parts)):
        if name not in known:
            raise ValueError(f"unknown part {name}")
    state = dict.fromkeys(known, State.RESIDENT)
    cause: dict[str, int] = {}
    outdated: dict[str, int] = {}
    found: dict[tuple[Fault, str, int], StateError] = {}

    def fault(kind: Fault, name: str, at: int, why: int | None) -> None:
        found.setdefault((kind, name, at), StateError(kind, name, at, why, actions[at].tag))

    for _ in range(2 if cyclic else 1):
        for at, action in enumerate(actions):
            for name in action.parts:
                if action.event is Event.USE:
                    if state[name] is State.DISCARDED:
                        fault(Fault.USED_AFTER_DISCARD, name, at, cause.get(name))
                    elif state[name] is State.HOST:
                        fault(Fault.USED_ON_HOST, name, at, cause.get(name))
                    elif name in outdated:
                        fault(Fault.OUT_OF_DATE, name, at, outdated[name])
                    continue
                if action.event is Event.OFFLOAD and state[name] is State.DISCARDED:
                    fault(Fault.SAVED_NOTHING, name, at, cause.get(name))
                    continue
                if action.event is Event.ONLOAD and state[name] is not State.HOST:
                    continue
                state[name] = {
                    Event.OFFLOAD: State.HOST,
                    Event.DISCARD: State.DISCARDED,
                    Event.ONLOAD: State.RESIDENT,
                    Event.LOAD: State.RESIDENT,
                }[action.event]
                cause[name] = at
            _outdate(parts, action, at, outdated)
    return tuple(sorted(found.values(), key=lambda e: (e.at, list(known).index(e.part), e.fault.value)))


def reload_list(parts: Sequence[Part], discarded: Sequence[str]) -> tuple[str, ...]:
    """What must be loaded before the next use once `discarded` are gone: they, then all that is derived from them."""
    gone = set(discarded)
    unknown = gone.difference(part.name for part in parts)
    if unknown:
        raise ValueError(f"unknown part {min(unknown)}")
    grown = True
    while grown:
        more = {part.name for part in parts if part.name not in gone and gone.intersection(part.of)}
        gone |= more
        grown = bool(more)
    own = [part.name for part in parts if part.name in gone and part.name in discarded]
    return (*own, *(part.name for part in parts if part.name in gone and part.name not in discarded))


def _outdate(parts: Sequence[Part], action: Action, at: int, outdated: dict[str, int]) -> None:
    """Loading a derived part makes it right again; a change of what it is derived from makes it wrong."""
    for part in parts:
        if part.stale is None:
            continue
        wrong = {Stale.ADDRESS: (Event.OFFLOAD, Event.DISCARD), Stale.CONTENT: (Event.LOAD,)}[part.stale]
        if action.event in wrong and set(action.parts) & set(part.of):
            outdated[part.name] = at
        if action.event is Event.LOAD and part.name in action.parts:
            outdated.pop(part.name, None)
