"""Life and age of a sample."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.samples import Phase, Sample, Segment
from rlflow.protocol.tally import Tally

NEW = Sample(id=1, group=0, version=5)

STEPS: dict[str, Callable[[Sample], Sample]] = {
    "begin": lambda s: s.begin(5),
    "interrupt": Sample.interrupt,
    "restart": Sample.restart,
    "finish": Sample.finish,
    "consume": lambda s: s.consume(6),
    "reject": lambda s: s.reject("filtered"),
    "abort": lambda s: s.abort("too old"),
}
LEGAL = {
    Phase.ADMITTED: {"begin": Phase.RUNNING, "reject": Phase.REJECTED, "abort": Phase.ABORTED},
    Phase.RUNNING: {
        "interrupt": Phase.ADMITTED,
        "restart": Phase.ADMITTED,
        "finish": Phase.FINISHED,
        "reject": Phase.REJECTED,
        "abort": Phase.ABORTED,
    },
    Phase.FINISHED: {"consume": Phase.CONSUMED, "reject": Phase.REJECTED, "abort": Phase.ABORTED},
    Phase.CONSUMED: {},
    Phase.REJECTED: {},
    Phase.ABORTED: {},
}
REACH: dict[Phase, list[str]] = {
    Phase.ADMITTED: [],
    Phase.RUNNING: ["begin"],
    Phase.FINISHED: ["begin", "finish"],
    Phase.CONSUMED: ["begin", "finish", "consume"],
    Phase.REJECTED: ["reject"],
    Phase.ABORTED: ["abort"],
}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("step", list(STEPS))
def test_transitions(phase: Phase, step: str) -> None:
    sample = NEW
    for name in REACH[phase]:
        sample = STEPS[name](sample)
    assert sample.phase is phase
    if step in LEGAL[phase]:
        assert STEPS[step](sample).phase is LEGAL[phase][step]
    else:
        with pytest.raises(ProtocolError, match=f"is {phase}"):
            STEPS[step](sample)


def test_lag_counts_from_the_oldest_token() -> None:
    sample = NEW.begin(5).extend(5, 10).extend(5, 3).extend(7, 4)
    assert sample.segments == (Segment(5, 13), Segment(7, 4))
    assert (sample.birth, sample.tokens, sample.age(8)) == (5, 17, 3)


def test_a_version_that_made_no_token_is_no_birth() -> None:
    interrupted = NEW.begin(5).interrupt()
    assert interrupted.birth is None
    assert interrupted.begin(9).extend(9, 1).age(9) == 0
    assert NEW.begin(5).extend(6, 0).extend(6, 2).birth == 6


def test_a_retry_is_born_again_and_an_interruption_is_not() -> None:
    sample = NEW.begin(5).extend(5, 8)
    assert sample.restart().begin(7).birth == 7
    assert sample.interrupt().begin(7).birth == 5


def test_an_engine_with_older_weights_than_the_gate_counted_is_refused() -> None:
    with pytest.raises(ProtocolError, match="still runs version 4"):
        NEW.begin(4)
    with pytest.raises(ProtocolError):
        NEW.begin(5).extend(4, 1)


def test_tokens_only_while_running() -> None:
    for sample in (NEW, NEW.begin(5).finish()):
        with pytest.raises(ProtocolError, match="not running"):
            sample.extend(5, 1)


@given(st.lists(st.tuples(st.integers(5, 9), st.integers(0, 4)), max_size=8))
def test_birth_and_tokens_of_any_history(parts: list[tuple[int, int]]) -> None:
    sample = NEW.begin(5).extend(5, 1)
    for version, tokens in parts:
        sample = sample.extend(version, tokens)
    assert sample.tokens == 1 + sum(tokens for _, tokens in parts)
    assert sample.birth == 5
    assert all(part.tokens for part in sample.segments[:-1])
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


def test_the_tally_counts_ends_only() -> None:
    tally = Tally()
    run = NEW.begin(5).extend(5, 10)
    tally.add(run.finish().consume(7))
    tally.add(run.reject("failed"))
    tally.add(run.finish().abort("too old"))
    with pytest.raises(ValueError, match="has not ended"):
        tally.add(run)
    assert (tally.consumed, tally.rejected, tally.aborted) == (1, {"failed": 1}, {"too old": 1})
    assert (tally.trained_tokens, tally.wasted_tokens, tally.ages) == (10, 20, {2: 1})
    assert Tally.from_json(json.loads(json.dumps(tally.to_json()))) == tally
