"""Weights through sleep and wake: what is used must be whole and up to date."""

from __future__ import annotations

import pytest

from rlflow.passes.analysis.memory.states import (
    Action,
    Event,
    Fault,
    Part,
    Stale,
    StateError,
    check_states,
    reload_list,
)

BASE, ADAPTER, ROTARY = Part("base"), Part("adapter"), Part("rotary")
CACHE = Part("prefix_cache", of=("base", "adapter"), stale=Stale.CONTENT)
GRAPH = Part("graph", of=("base",), stale=Stale.ADDRESS)
MODEL = [BASE, ADAPTER, ROTARY]


def do(event: Event, *parts: str, tag: str = "") -> Action:
    return Action(event, parts, tag)


def test_use_after_discard_without_a_full_reload_is_a_fault() -> None:
    """Rotary tables are in no checkpoint: a reload of base and adapter is not enough."""
    actions = [
        do(Event.DISCARD, "base", "adapter", "rotary"),
        do(Event.ONLOAD, "base", "adapter", "rotary"),
        do(Event.LOAD, "base", "adapter"),
        do(Event.USE, "base", "adapter", "rotary", tag="line 7"),
    ]
    assert check_states(MODEL, actions) == (StateError(Fault.USED_AFTER_DISCARD, "rotary", 3, 0, "line 7"),)
    actions[2] = do(Event.LOAD, *reload_list(MODEL, ["base", "adapter", "rotary"]))
    assert check_states(MODEL, actions) == ()


def test_a_sync_of_the_adapter_alone_brings_the_base_back_only_from_a_kept_copy() -> None:
    def cycle(sleep: Event) -> list[Action]:
        return [
            do(Event.USE, "base", "adapter"),
            do(sleep, "base", "adapter"),
            do(Event.ONLOAD, "base", "adapter"),
            do(Event.LOAD, "adapter"),
        ]

    found = check_states([BASE, ADAPTER], cycle(Event.DISCARD))
    assert [(e.fault, e.part, e.at, e.cause) for e in found] == [(Fault.USED_AFTER_DISCARD, "base", 0, 1)]
    assert check_states([BASE, ADAPTER], cycle(Event.DISCARD), cyclic=False) == ()  # the use comes once, before it
    assert check_states([BASE, ADAPTER], cycle(Event.OFFLOAD)) == ()


def test_what_sleeps_is_not_used_and_what_is_gone_not_saved() -> None:
    actions = [do(Event.OFFLOAD, "base"), do(Event.USE, "base"), do(Event.DISCARD, "base"), do(Event.OFFLOAD, "base")]
    assert [(e.fault, e.at, e.cause) for e in check_states([BASE], actions, cyclic=False)] == [
        (Fault.USED_ON_HOST, 1, 0),
        (Fault.SAVED_NOTHING, 3, 2),
    ]


def test_onload_of_what_was_discarded_brings_no_content() -> None:
    actions = [do(Event.DISCARD, "base"), do(Event.ONLOAD, "base"), do(Event.USE, "base")]
    assert [e.fault for e in check_states([BASE], actions)] == [Fault.USED_AFTER_DISCARD]


def test_a_cache_of_old_weights_must_be_invalidated_after_a_publish() -> None:
    publish, use = do(Event.LOAD, "base"), do(Event.USE, "base", "prefix_cache")
    parts = [BASE, ADAPTER, CACHE]
    assert [(e.fault, e.part, e.at, e.cause) for e in check_states(parts, [publish, use])] == [
        (Fault.OUT_OF_DATE, "prefix_cache", 1, 0)
    ]
    assert check_states(parts, [publish, do(Event.LOAD, "prefix_cache"), use]) == ()
    assert check_states(parts, [do(Event.OFFLOAD, "base"), do(Event.ONLOAD, "base"), use]) == ()  # same content


def test_a_captured_graph_must_be_captured_anew_after_its_weights_moved() -> None:
    moved = [do(Event.OFFLOAD, "base"), do(Event.ONLOAD, "base")]
    use = do(Event.USE, "base", "graph")
    assert [(e.fault, e.cause) for e in check_states([BASE, GRAPH], [*moved, use])] == [(Fault.OUT_OF_DATE, 0)]
    assert check_states([BASE, GRAPH], [*moved, do(Event.LOAD, "graph"), use]) == ()
    assert check_states([BASE, GRAPH], [do(Event.LOAD, "base"), use]) == ()  # written in place


def test_the_reload_list_holds_what_is_derived() -> None:
    parts = [CACHE, GRAPH, *MODEL]
    assert reload_list(parts, ["base"]) == ("base", "prefix_cache", "graph")
    assert reload_list(parts, ["rotary"]) == ("rotary",)


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown part head"):
        check_states([BASE], [do(Event.USE, "head")])
    with pytest.raises(ValueError, match="unknown part head"):
        reload_list([BASE], ["head"])
    with pytest.raises(ValueError, match="unknown part x"):
        check_states([Part("c", of=("x",))], [])
