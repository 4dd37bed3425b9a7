"""The engine against the loop over tokens: the same events at the same times, whatever the settings and commands."""

from __future__ import annotations

import random
from collections import Counter
from math import inf, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.simulator.engine import Engine
from rlflow.backends.simulator.engine_messages import (
    Abort,
    Command,
    EngineEvent,
    Interrupt,
    Pause,
    Publish,
    Request,
    Resume,
    SetSpeed,
    Submit,
)
from rlflow.backends.simulator.engine_settings import Band, BandedStep, EngineSettings, PrefillCost
from rlflow.backends.simulator.engine_token_loop import Script, token_loop

COUNTS = st.integers(0, 64)


@st.composite
def engines(draw: st.DrawFn, unit: float) -> EngineSettings:
    """Every cost is a multiple of `unit`: a power of two keeps sums exact, so that ties are ties."""
    limits = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=3)))
    bands = tuple(Band(limit, (1 + draw(COUNTS)) * unit, draw(COUNTS) * unit, draw(COUNTS) * unit) for limit in limits)
    slots = draw(st.integers(1, 6))
    prefill = draw(
        st.none() | st.builds(lambda a, b, c: PrefillCost(a * unit, b * unit, c * unit), COUNTS, COUNTS, COUNTS)
    )
    return EngineSettings(
        BandedStep(bands),
        slots,
        kv_blocks=draw(st.none() | st.integers(24, 60)),
        block=draw(st.sampled_from([1, 2, 3, 4, 16])),
        spare_blocks=draw(st.sampled_from([0, 0, 1, 5])),
        expected=draw(st.sampled_from([0, 0, 3, 7, 20])),
        prefill=prefill,
        step_tokens=draw(st.none() | st.integers(slots, slots + 12)) if prefill else None,
        mixed=draw(st.booleans()),
        shared_prefix=draw(st.booleans()),
        ranks=draw(st.sampled_from([1, 1, 2, 3])),
    )


@st.composite
def scripts(draw: st.DrawFn, unit: float, ranks: int) -> Script:
    """Up to 20 requests of at most 24 tokens, so that one fits the smallest cache; some bring tokens along."""
    script: list[tuple[float, Command]] = []
    requests = 0
    time = 0.0
    for _ in range(draw(st.integers(1, 8))):
        time += draw(st.integers(0, 1500)) * unit * draw(st.sampled_from([0, 1, 1, 10]))
        kind = draw(
            st.sampled_from(["submit", "submit", "submit", "abort", "interrupt", "publish", "pause", "resume", "speed"])
        )
        ids = st.lists(st.integers(0, max(0, requests - 1)), max_size=4).map(tuple)
        command: Command
        if kind == "submit":
            made = []
            for _ in range(draw(st.integers(1, 7))):
                length = draw(st.integers(1, 14))
                before = draw(st.sampled_from([0, 0, 0, length // 2]))
                segments = ((-1, before),) if before else ()
                made.append(
                    Request(
                        requests, draw(st.integers(0, 10)), length, draw(st.sampled_from([None, "a", "b"])), segments
                    )
                )
                requests += 1
            command = Submit(tuple(made), draw(st.none() | st.integers(0, ranks - 1)))
        elif kind == "abort":
            command = Abort(draw(ids))
        elif kind == "interrupt":
            command = Interrupt(draw(st.none() | ids))
        elif kind == "publish":
            command = Publish(len(script), draw(st.sampled_from([0, 0, 100, 3000])) * unit, draw(st.booleans()))
        elif kind == "speed":
            command = SetSpeed(draw(st.sampled_from([0.5, 1.0, 2.0])))
        else:
            command = Pause() if kind == "pause" else Resume()
        script.append((time, command))
    return script


def play(engine: Engine, script: Script, *, curious: bool = False) -> list[EngineEvent]:
    """`curious`: looks at every event by itself, as a larger simulation does."""
    events = []
    for time, command in script:
        while curious and engine.next_time() < time:
            events += engine.advance_to(engine.next_time())
        events += engine.advance_to(time)
        engine.send(command, time)
    while engine.next_time() < inf:
        events += engine.advance_to(engine.next_time() if curious else inf)
    return events


UNIT = 2.0**-20


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_same_events_at_the_very_same_times_where_sums_are_exact(data: st.DataObject, curious: bool) -> None:
    made = data.draw(engines(UNIT))
    script = data.draw(scripts(UNIT, made.ranks))
    assert play(Engine(made), script, curious=curious) == token_loop(made, script)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.floats(1e-6, 1e-3))
def test_same_events_at_the_same_times_but_for_rounding(data: st.DataObject, unit: float) -> None:
    # Commands come at irrational times, so none meets the end of a step that rounding could put on its other side.
    made = data.draw(engines(unit))
    script = [(time * sqrt(2) + unit / sqrt(3), command) for time, command in data.draw(scripts(unit, made.ranks))]
    told, expected = play(Engine(made), script), token_loop(made, script)
    assert [event[1:] for event in told] == [event[1:] for event in expected]
    assert [event.time for event in told] == pytest.approx([event.time for event in expected], rel=1e-9)


def random_case(rng: random.Random) -> tuple[EngineSettings, Script]:
    """Larger than what hypothesis would make: hundreds of tokens, a cache for two of the longest and more."""
    longest = rng.choice([100, 400])
    slots, block = rng.randint(1, 24), rng.choice([1, 2, 16])
    bands = tuple(
        Band(limit, rng.uniform(1e-3, 1e-2), rng.uniform(0, 1e-4), rng.uniform(0, 1e-6)) for limit in (1, 2, 4, 8, 16)
    )
    made = EngineSettings(
        BandedStep(bands),
        slots,
        kv_blocks=-(-2 * longest // block) + rng.randint(0, 6 * longest // block),
        block=block,
        spare_blocks=rng.choice([0, 2]),
        expected=rng.choice([0, 0, longest // 4, longest]),
        prefill=PrefillCost(rng.uniform(0, 1e-4), rng.uniform(0, 1e-7), rng.uniform(0, 1e-3)),
        step_tokens=slots + rng.randint(0, longest),
        mixed=rng.random() < 0.7,
        ranks=rng.choice([1, 1, 4]),
    )
    script: list[tuple[float, Command]] = []
    for start in range(0, 120, 40):
        requests = (
            Request(i, rng.randint(0, longest), rng.randint(1, longest), i // 4) for i in range(start, start + 40)
        )
        script.append((start * rng.uniform(0, 0.02), Submit(tuple(requests))))
    for version in range(1, 4):
        script.append((rng.uniform(0, 5), Publish(version, rng.uniform(0, 0.5), rng.random() < 0.5)))
    script.append((rng.uniform(0, 5), Interrupt(tuple(rng.sample(range(120), 10)))))
    script.append((rng.uniform(0, 5), Abort(tuple(rng.sample(range(120), 10)))))
    return made, sorted(script, key=lambda order: order[0])


def test_same_events_in_larger_cases() -> None:
    kinds = Counter[str]()
    for seed in range(20):
        made, script = random_case(random.Random(seed))
        told, expected = play(Engine(made), script), token_loop(made, script)
        assert [event[1:] for event in told] == [event[1:] for event in expected], seed
        assert [event.time for event in told] == pytest.approx([event.time for event in expected], rel=1e-9), seed
        kinds.update(event.kind for event in told)
    assert min(kinds[kind] for kind in ("finished", "preempted", "aborted", "interrupted", "published")) > 20
