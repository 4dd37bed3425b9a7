"""Group C of the field reports (memory when switching between training and rollout): what the plan says."""

from __future__ import annotations

from typing import Any

from rlflow.passes.analysis.memory.states import Action, Event, Fault, Part, check_states
from rlflow.passes.analysis.memory.wake import WakeOrder, WakeOverflow, best_order, check_order, engine_wake
from rlflow.plan import Plan

SHARED = "pool main = 8 devices {} place actor.generate on main with tp = 2 place actor.train on main with tp = 4"
"""Training and rollout take turns on the same devices, in layouts that differ."""
CACHE = "samples keys and values"
COPY = "actor rollout weights"


def ids_of(plan: Plan) -> list[str]:
    (program,) = plan.programs
    return [instruction.id for instruction in program.step]


def test_C1_the_peak_depends_on_the_order(place_: Any) -> None:
    """80 GiB, gathered weights 15, engine 15, cache 48, other 4: 82 where everything wakes first, 67 in stages."""
    ops = engine_wake(gathered_bytes=15, engine_bytes=15, kv_bytes=48)
    everything = check_order(ops, ("wake weights", "wake kv", "load weights", "free gathered"), 15 + 4, 80)
    assert isinstance(everything, WakeOverflow)
    assert (everything.bytes, everything.missing_bytes) == (82, 2)
    staged = best_order(ops, 15 + 4)
    assert staged.names == ("wake weights", "load weights", "free gathered", "wake kv")
    assert staged.peak_bytes == 67
    assert isinstance(check_order(ops, staged.names, 15 + 4, 67), WakeOrder)
    ids = ids_of(place_(SHARED.format("")).plan)
    wanted = ["reshard:actor", f"rebuild:{CACHE}", "run:samples", f"drop:{COPY}", "run:actor.train"]
    assert [i for i in ids if i in wanted] == wanted, "the cache comes back after the weights"


def test_C2_what_does_not_fit_all_the_time_leaves_for_a_while(place_: Any) -> None:
    """The plan states the peak without moving anything and the one with it, and takes the second where it must.

    The report's own 80 and 60 GiB: test_the_optimizer_on_the_device_only_around_the_step_takes_60_instead_of_80. In a
    plan of a flow an update is one phase, so that its optimizer state is there for all of it.
    """
    (plenty,) = place_(SHARED.format("{ memory = 59 GiB }")).plan.memory
    assert plenty.peak == plenty.peak_without_swaps <= 60 * 2**30
    (tight,) = place_(SHARED.format("{ memory = 50 GiB }")).plan.memory
    assert tight.peak_without_swaps == plenty.peak_without_swaps > 50 * 2**30
    assert tight.peak <= 50 * 2**30
    refused = place_(SHARED.format("{ memory = 36 GiB, swap = false }"))
    assert refused.codes == ["RLF2004"]
    assert "on a device of pool `main`, which has 36.0 GiB" in refused.words
    assert "`swap = true` on pool `main`" in refused.words


def test_C3_dropped_weights_are_loaded_before_they_are_used(place_: Any) -> None:
    """The instruction list, played: what is dropped is written by a whole reshard before the next rollout reads it."""
    ids = ids_of(place_(SHARED.format("{ memory = 40 GiB }")).plan)
    events = {
        f"drop:{COPY}": Action(Event.DISCARD, ("copy",)),
        "reshard:actor": Action(Event.LOAD, ("copy",)),
        "run:samples": Action(Event.USE, ("copy",)),
    }
    parts = [Part("copy")]
    played = [events[i] for i in ids if i in events]
    assert {action.event for action in played} == {Event.DISCARD, Event.LOAD, Event.USE}
    assert check_states(parts, played) == ()
    without = [action for action in played if action.event is not Event.LOAD]
    assert {error.fault for error in check_states(parts, without)} == {Fault.USED_AFTER_DISCARD}


def test_C9_stages_of_one_pool_never_start_together(place_: Any) -> None:
    """A pool has one instruction list, so generation and training measure and take memory one after the other."""
    plan = place_(SHARED.format("")).plan
    ids = ids_of(plan)
    assert len(plan.programs) == 1
    assert ids.index("run:samples") < ids.index("run:actor.train")


def test_C10_a_shared_engine_gets_what_training_leaves(place_: Any) -> None:
    """No share of the memory is given: a cache that stays beside training gets the rest, one that leaves gets more."""

    def cache(settings: str) -> tuple[int, Any, str]:
        result = place_(SHARED.format(settings), max_new=4096, prompts=256)
        (memory,) = result.plan.memory
        contents = {phase.stage: dict(phase.contents) for phase in memory.phases}
        assert all(sum(found.values()) <= memory.capacity for found in contents.values())
        return contents["samples"][CACHE], (memory, contents), result.shown

    stays, (memory, contents), shown = cache("{ swap = false }")
    training = sum(size for name, size in contents["actor.train"].items() if name != CACHE)
    assert 0 < stays <= memory.capacity - training
    assert stays == contents["actor.train"][CACHE], "it is there all the time"
    assert f"{CACHE} {stays / 2**30:.1f} GiB" in shown
    leaves, (_, contents), shown = cache("")
    assert leaves > stays
    assert CACHE not in contents["actor.train"]
    assert f"{CACHE} {leaves / 2**30:.1f} GiB" in shown
