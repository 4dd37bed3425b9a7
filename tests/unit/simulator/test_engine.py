"""The engine on cases worked by hand."""

from __future__ import annotations

import heapq
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.simulator.engine import Engine
from rlflow.backends.simulator.engine_messages import EngineError, EngineEvent, Publish, Request, SetSpeed
from rlflow.backends.simulator.engine_settings import Band, BandedStep, EngineSettings, PrefillCost, ScaledStep
from rlflow.cost.decode import DecodeStep
from rlflow.cost.lengths import Lognormal
from rlflow.cost.occupancy import Requests, occupancy

STEP = BandedStep((Band(1, 1.0, 0.0, 0.0),))
"""A second a step, whatever runs."""


def told(events: list[EngineEvent]) -> list[tuple[float, str, object]]:
    return [(event.time, event.kind, event.id) for event in events]


# --- time of steps ---------------------------------------------------------------------------------------------------


def test_a_step_costs_its_fixed_part_its_requests_and_the_tokens_they_hold() -> None:
    engine = Engine(EngineSettings(BandedStep((Band(8, 100.0, 10.0, 1.0),)), slots=8))
    # Steps: 100 + 20 + (3 + 5), 100 + 20 + (4 + 6), then alone 100 + 10 + 7.
    assert told(engine.run([Request("a", 3, 2), Request("b", 5, 3)])) == [
        (258, "finished", "a"),
        (375, "finished", "b"),
    ]
    assert engine.totals.steps == 3
    assert engine.totals.busy == 375


def test_bands_hold_up_to_their_number_of_requests_and_the_last_one_beyond() -> None:
    step = BandedStep((Band(1, 1.0, 0.0, 0.0), Band(2, 10.0, 0.0, 0.0), Band(4, 100.0, 0.0, 0.0)))
    requests = [Request(i, 0, i + 1) for i in range(5)]
    assert [event.time for event in Engine(EngineSettings(step, slots=8)).run(requests)] == [100, 200, 300, 310, 311]


def test_all_at_once_takes_the_sum_over_sorted_lengths() -> None:
    lengths = [7, 2, 31, 2, 12, 5]
    step = BandedStep((Band(2, 1e-2, 1e-4, 1e-6), Band(6, 2e-2, 3e-4, 2e-6)))
    total, before = 0.0, 0
    for done, length in enumerate(sorted(lengths)):
        fixed, each, token = step.affine(running := len(lengths) - done)
        total += sum(fixed + running * (each + token * (11 + t)) for t in range(before, length))
        before = length
    events = Engine(EngineSettings(step, slots=6)).run(Request(i, 11, length) for i, length in enumerate(lengths))
    assert events[-1].time == pytest.approx(total, rel=1e-12)


def test_a_slow_engine_and_a_scaled_step_take_longer_alike() -> None:
    requests = [Request(i, 4, 3 + i) for i in range(4)]
    step = BandedStep((Band(4, 3.0, 0.5, 0.25),))
    plain = Engine(EngineSettings(step, slots=3)).run(requests)
    engine = Engine(EngineSettings(step, slots=3))
    engine.set_speed(0.5, 0)
    slow = engine.run(requests)
    assert [event.time for event in slow] == [2 * event.time for event in plain]
    assert Engine(EngineSettings(ScaledStep(step, 2.0), slots=3)).run(requests) == slow


def test_a_million_tokens_are_one_event() -> None:
    engine = Engine(EngineSettings(BandedStep((Band(1, 1e-3, 0.0, 1e-9),)), slots=1))
    (event,) = engine.run([Request(0, 0, 10**6)])
    assert event.time == pytest.approx(1e3 + 1e-9 * 10**6 * (10**6 - 1) / 2, rel=1e-12)


def test_agrees_with_the_closed_form_of_the_cost_model() -> None:
    from rlflow.cost.draws import LengthSampler

    step = DecodeStep(
        4e-3, 6e-3, -0.06, 1.0, 1e-5, 2e-9, 1e-3, 1e-5, 0.0, 0.0, 0.0, 0.0, 0.0, buckets=(8, 16, 32, 64, 128, 256)
    )
    lengths = Lognormal.of_mean(1500, 8192)
    requests = Requests(prompts=32, samples=8, engines=1)
    for slots, tolerance in ((256, 0.02), (64, 0.05)):
        expected = sum(
            band.steps * step.seconds(band.running, band.held) for band in occupancy(lengths, 200, requests, slots)
        )
        seconds = 0.0
        for seed in range(20):
            drawn = [LengthSampler(lengths, seed).group(0, prompt, 8) for prompt in range(32)]
            made = [Request((p, s), 200, tokens) for p, group in enumerate(drawn) for s, tokens in enumerate(group)]
            seconds += Engine(EngineSettings(step, slots=slots)).run(made)[-1].time / 20
        assert seconds == pytest.approx(expected, rel=tolerance), slots


# --- slots and cache -------------------------------------------------------------------------------------------------


def test_requests_queue_for_slots_in_order() -> None:
    engine = Engine(EngineSettings(STEP, slots=2))
    events = engine.run([Request("a", 0, 3), Request("b", 0, 1), Request("c", 0, 1), Request("d", 0, 2)])
    assert told(events) == [(1, "finished", "b"), (2, "finished", "c"), (3, "finished", "a"), (4, "finished", "d")]


def test_headroom_lets_nobody_in_who_would_be_thrown_out() -> None:
    """a, b and c need 8 of 20 in the end: two fit. Without headroom c, of 4 now, is let in and thrown out."""
    requests = [Request(name, 3, 5) for name in "abc"]
    for expected, thrown_out in ((0, 1), (5, 0)):
        engine = Engine(EngineSettings(STEP, slots=3, kv_blocks=20, expected=expected))
        engine.run(requests)
        assert engine.totals.preemptions == thrown_out


def test_headroom_counts_what_is_still_to_come() -> None:
    """When d comes a and b have 5 and room for the next token, which is all that is expected; d asks for 2 + 4. With one
    block less it waits until they have ended, since longer responses than expected count as they are."""
    for blocks, ends in ((18, 4), (17, 7)):
        engine = Engine(EngineSettings(STEP, slots=9, kv_blocks=blocks, expected=4))
        engine.submit([Request("a", 2, 6), Request("b", 2, 6)], 0)
        events = engine.advance_to(3)
        engine.submit([Request("d", 2, 1)], 3)
        events += engine.advance_to(inf)
        assert [event.time for event in events if event.id == "d"] == [ends]
        assert engine.totals.preemptions == 0


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    blocks=st.integers(40, 120),
    block=st.sampled_from([1, 1, 4]),
    ranks=st.sampled_from([1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_who_expects_the_longest_throws_nobody_out(lengths: list[int], blocks: int, block: int, ranks: int) -> None:
    made = EngineSettings(STEP, slots=16, kv_blocks=-(-blocks // block), block=block, expected=30, ranks=ranks)
    engine = Engine(made)
    engine.run(Request(i, 5, length) for i, length in enumerate(lengths))
    assert engine.totals.preemptions == 0


def test_a_full_cache_throws_out_the_last_admitted_which_comes_back_first() -> None:
    engine = Engine(EngineSettings(STEP, slots=3, kv_blocks=12))
    # a and b hold 4 each and have room for one more: 10 blocks, too many left for c. After 2 steps each needs 7.
    events = engine.run([Request("a", 4, 4), Request("b", 4, 4), Request("c", 4, 1)])
    assert told(events) == [
        (2, "preempted", "b"),
        (4, "finished", "a"),
        (5, "finished", "c"),
        (6, "finished", "b"),
    ]
    assert events[0].segments == ((0, 2),)
    assert engine.totals.preemptions == 1


def test_a_preempted_request_is_prefilled_with_what_it_had_generated() -> None:
    settings = EngineSettings(STEP, slots=3, kv_blocks=12, prefill=PrefillCost(10.0))
    engine = Engine(settings)
    events = engine.run([Request("a", 4, 4), Request("b", 4, 4)])
    # Prefill of both 81 s, 2 steps, a goes on alone for 2, and b has 6 tokens prefilled before its last 2.
    assert told(events) == [(83, "preempted", "b"), (85, "finished", "a"), (85 + 61 + 2, "finished", "b")]
    assert (engine.totals.prefilled, engine.totals.generated) == (4 + 4 + 6, 4 + 4)


@pytest.mark.parametrize(
    ("aborted", "rest"),
    [
        (["a"], [(4, "finished", "b"), (5, "finished", "c")]),  # c fits, but waits for one step
        (["a", "b"], [(4, "finished", "c")]),  # nothing runs any more, so c is admitted at once
    ],
)
def test_who_was_thrown_out_waits_for_a_step_unless_nothing_runs(aborted: list[str], rest: list[object]) -> None:
    engine = Engine(EngineSettings(STEP, slots=3, kv_blocks=12))
    engine.submit([Request(id, 2, 4) for id in "abc"], 0)
    engine.advance_to(1.5)
    engine.abort(aborted, 1.5)
    expected = [(2, "preempted", "c"), *[(2, "aborted", id) for id in aborted], *rest]
    assert told(engine.advance_to(inf)) == expected


def test_blocks_are_taken_whole() -> None:
    # Of 8 tokens: a prompt of 7 and its next token fill one block, one of 8 takes two.
    for prompt, running in ((7, 2), (8, 1)):
        engine = Engine(EngineSettings(STEP, slots=2, kv_blocks=3, block=8))
        engine.submit([Request("a", prompt, 2), Request("b", prompt, 1)], 0)
        engine.advance_to(0)
        assert engine.running == running


def test_spare_blocks_are_for_those_that_run() -> None:
    engine = Engine(EngineSettings(STEP, slots=2, kv_blocks=12, spare_blocks=5))
    engine.submit([Request("a", 3, 2), Request("b", 3, 2)], 0)
    engine.advance_to(0)
    assert engine.running == 1  # 4 + 4 + 5 spare ones are more than 12
    big = Engine(EngineSettings(STEP, slots=2, kv_blocks=12, spare_blocks=5))
    assert told(big.run([Request("a", 10, 2)])) == [(2, "finished", "a")]  # nothing runs, so none is spared


# --- prefill ---------------------------------------------------------------------------------------------------------


def test_prefill_in_chunks_costs_as_much_as_in_one_pass() -> None:
    prefill = PrefillCost(token=1.0, square=0.5, context=7.0)
    whole = Engine(EngineSettings(STEP, slots=1, prefill=prefill)).run([Request(0, 100, 1)])
    chunked = Engine(EngineSettings(STEP, slots=1, prefill=prefill, step_tokens=9)).run([Request(0, 100, 1)])
    assert whole[0].time == 1 + 100 + 0.5 * 100**2 + 7 + 1
    assert chunked[0].time == whole[0].time + 11  # steps more than one


def test_decoding_goes_on_in_mixed_steps_and_waits_in_others() -> None:
    for mixed, steps in ((True, 10), (False, 14)):
        settings = EngineSettings(STEP, slots=2, prefill=PrefillCost(0.0), step_tokens=6, mixed=mixed)
        engine = Engine(settings)
        engine.submit([Request("a", 0, 10)], 0)
        engine.advance_to(2)
        engine.submit([Request("b", 21, 1)], 2)  # 5 tokens a step beside one that decodes, 6 alone
        assert (steps, "finished", "a") in told(engine.advance_to(inf))


def test_a_prompt_is_computed_and_kept_once_for_its_group() -> None:
    prefill = PrefillCost(token=1.0)
    group = [Request(i, 33, 5, "g") for i in range(4)]
    settings = EngineSettings(STEP, slots=4, kv_blocks=2 + 4, block=16, prefill=prefill)
    engine = Engine(settings)
    engine.submit(group, 0)
    engine.advance_to(0)
    assert engine.running == 4  # two shared blocks and one each
    engine.advance_to(inf)
    assert engine.totals.prefilled == 32 + 4
    alone = Engine(EngineSettings(STEP, slots=4, prefill=prefill, shared_prefix=False))
    alone.run(group)
    assert alone.totals.prefilled == 4 * 33


def test_what_an_aborted_request_has_not_computed_of_the_prompt_its_group_computes() -> None:
    settings = EngineSettings(STEP, slots=4, prefill=PrefillCost(0.0), step_tokens=4)
    engine = Engine(settings)
    engine.submit([Request(i, 21, 3, "g") for i in range(2)], 0)
    engine.advance_to(6.5)
    engine.publish(1, 6.5, keep_kv=False)  # both have decoded one token in step 7
    engine.advance_to(9.5)
    engine.abort([0], 9.5)
    # 12 of 22 tokens were computed again in 3 steps, 10 are left: 3 steps more, and two that decode.
    assert told(engine.advance_to(inf)) == [(10, "aborted", 0), (15, "finished", 1)]
    assert engine.totals.prefilled == 21 + 1 + 12 + 10


# --- commands --------------------------------------------------------------------------------------------------------


def test_commands_are_followed_at_the_end_of_a_step() -> None:
    engine = Engine(EngineSettings(STEP, slots=2))
    engine.submit([Request("a", 0, 5), Request("b", 0, 5)], 0)
    assert engine.next_time() == 0
    assert engine.advance_to(0) == []
    assert engine.next_time() == 5
    engine.abort(["b", "unknown"], 1.5)
    assert engine.next_time() == 2
    assert engine.advance_to(2) == [EngineEvent(2, "aborted", "b", ((0, 2),))]
    engine.submit([Request("c", 0, 1)], 2)  # at the very end of a step: it joins the next one
    assert told(engine.advance_to(inf)) == [(3, "finished", "c"), (5, "finished", "a")]


def test_an_interrupted_request_goes_on_elsewhere_with_its_segments() -> None:
    settings = EngineSettings(STEP, slots=1, prefill=PrefillCost(1.0))
    first = Engine(settings, version=3)
    first.submit([Request("a", 10, 6), Request("b", 10, 6)], 0)
    assert first.advance_to(12.5) == []
    first.interrupt(12.5)
    events = first.advance_to(inf)
    # Prefill 11 s, then steps that end at 12 and 13.
    assert events == [EngineEvent(13, "interrupted", "a", ((3, 2),)), EngineEvent(13, "interrupted", "b", ())]
    second = Engine(settings, version=4, start=20.0)
    resumed = second.run([Request("a", 10, 6, segments=events[0].segments)])
    assert resumed == [EngineEvent(20 + 13 + 4, "finished", "a", ((3, 2), (4, 4)))]
    assert second.totals.prefilled == 12


def test_a_publication_pauses_and_splits_segments() -> None:
    for keep_kv, more in ((True, 0), (False, 1 + 12)):
        engine = Engine(EngineSettings(STEP, slots=1, prefill=PrefillCost(1.0)))
        engine.submit([Request("a", 10, 6)], 0)
        assert engine.advance_to(12.5) == []
        engine.publish(1, 12.5, 4.0, keep_kv=keep_kv)
        assert engine.advance_to(17) == [EngineEvent(17, "published")]
        assert engine.version == 1
        assert engine.advance_to(inf) == [EngineEvent(17 + more + 4, "finished", "a", ((0, 2), (1, 4)))]
        assert engine.totals.paused == 4
        assert engine.totals.busy == 17 + more


def test_commands_during_a_publication_wait_for_its_end_and_publications_follow_each_other() -> None:
    engine = Engine(EngineSettings(STEP, slots=2))
    engine.submit([Request("a", 0, 3)], 0)
    assert engine.advance_to(0.5) == []
    engine.publish(1, 0.5, 10.0)
    engine.advance_to(1)
    engine.submit([Request("b", 0, 1)], 2)
    engine.publish(2, 3, 5.0)
    engine.abort(["b"], 3)
    events = engine.advance_to(inf)
    assert told(events) == [
        (11, "published", None),
        (16, "published", None),
        (16, "aborted", "b"),
        (18, "finished", "a"),
    ]
    assert events[-1].segments == ((0, 1), (2, 2))


def test_a_pause_lasts_until_it_is_undone() -> None:
    engine = Engine(EngineSettings(STEP, slots=1))
    engine.submit([Request("a", 0, 3)], 0)
    assert engine.advance_to(0.5) == []
    engine.pause(0.5)
    assert told(engine.advance_to(100)) == [(1, "paused", None)]
    assert engine.next_time() == inf
    engine.submit([Request("b", 0, 1)], 150)
    engine.advance_to(150)
    assert engine.next_time() == inf
    engine.resume(200)
    assert told(engine.advance_to(inf)) == [(202, "finished", "a"), (203, "finished", "b")]


def test_many_engines_fit_one_heap() -> None:
    engines = [Engine(EngineSettings(BandedStep((Band(1, 1.0 + i, 0.0, 0.0),)), slots=1)) for i in range(3)]
    heap: list[tuple[float, int]] = []
    for i, engine in enumerate(engines):
        engine.submit([Request((i, j), 0, 2) for j in range(2)], 0)
        heapq.heappush(heap, (engine.next_time(), i))
    seen: list[tuple[float, str, object]] = []
    while heap:
        time, i = heapq.heappop(heap)
        seen += told(engines[i].advance_to(time))
        if engines[i].next_time() < inf:
            heapq.heappush(heap, (engines[i].next_time(), i))
    assert [time for time, _, _ in seen] == [2, 4, 4, 6, 8, 12]
    assert [engine.unfinished for engine in engines] == [0, 0, 0]


# --- lock step -------------------------------------------------------------------------------------------------------


def test_ranks_in_lock_step_take_the_step_of_the_slowest() -> None:
    step = BandedStep((Band(4, 1.0, 0.0, 1.0),))
    engine = Engine(EngineSettings(step, slots=4, ranks=2))
    # Rank 0 holds 10, 11, ...; rank 1 holds 3 x 3, 3 x 4, ... and is the slowest from the second step on.
    engine.submit([Request("a", 10, 4)], 0, rank=0)
    engine.submit([Request(i, 3, 4) for i in range(3)], 0, rank=1)
    expected = sum(1 + max(10 + j, 3 * (3 + j)) for j in range(4))
    assert [event.time for event in engine.advance_to(inf)] == [expected] * 4


def test_requests_without_a_rank_go_where_the_fewest_are() -> None:
    engine = Engine(EngineSettings(STEP, slots=1, ranks=2))
    engine.submit([Request("a", 0, 2)], 0, rank=1)
    engine.submit([Request("b", 0, 1), Request("c", 0, 1), Request("d", 0, 1)], 0)
    # b to rank 0; then both have one, so c to rank 0 and d to rank 1.
    assert told(engine.advance_to(inf)) == [
        (1, "finished", "b"),
        (2, "finished", "c"),
        (2, "finished", "a"),
        (3, "finished", "d"),
    ]


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_messages_that_cannot_be_followed_are_refused_and_change_nothing() -> None:
    engine = Engine(EngineSettings(STEP, slots=1, kv_blocks=10, ranks=2))
    engine.submit([Request("a", 5, 5)], 1.0)
    for requests, rank, why in (
        ([Request("b", 5, 6)], None, "does not fit a cache of 10 tokens"),
        ([Request("a", 1, 1)], None, "in the engine already"),
        ([Request("b", 1, 1), Request("b", 2, 2)], None, "same id"),
        ([Request("b", 1, 1)], 2, "no rank 2"),
    ):
        with pytest.raises(EngineError, match=why):
            engine.submit(requests, 1.0, rank)
    for time in (0.5, 1.5):  # before the last command; after something that nobody has looked at
        with pytest.raises(EngineError, match="a command at"):
            engine.abort(["a"], time)
    assert told(engine.advance_to(inf)) == [(6, "finished", "a")]
    engine.submit([Request("a", 5, 5)], 6.0)  # it has left, so it may come again
    with pytest.raises(EngineError, match="already"):
        engine.submit([Request("a", 1, 1)], 6.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Request(0, 1, 0),
        lambda: Request(0, -1, 1),
        lambda: Request(0, 1, 5, segments=((0, 5),)),
        lambda: Publish(1, -1.0),
        lambda: Publish(1, float("nan")),
        lambda: SetSpeed(0.0),
        lambda: BandedStep(()),
        lambda: BandedStep((Band(2, 1, 0, 0), Band(2, 1, 0, 0))),
        lambda: BandedStep((Band(2, -1, 0, 0),)),
        lambda: PrefillCost(-1.0),
        lambda: EngineSettings(STEP, slots=0),
        lambda: EngineSettings(STEP, slots=1, kv_blocks=0),
        lambda: EngineSettings(STEP, slots=1, spare_blocks=-1),
        lambda: EngineSettings(STEP, slots=1, step_tokens=8),
        lambda: EngineSettings(STEP, slots=9, step_tokens=8, prefill=PrefillCost(0.0)),
    ],
)
def test_what_cannot_be_is_refused(make: object) -> None:
    with pytest.raises(EngineError):
        make()  # type: ignore[operator]
