"""Samples that are begun in one call and ended in another."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.backends.ray_runtime import rollout
from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.engine import Generated
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.protocol.samples import Segment
from tests.unit.ray_runtime.rollout_jobs import TEXTS, load, model, op, paused, prompts, rows, sampled

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[Literal["qwen3", "llama", "qwen3_moe"]] = ["qwen3", "llama", "qwen3_moe"]


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def keys(samples: Batch) -> list[tuple[int, int]]:
    return list(zip(samples.array("uid").tolist(), samples.array("sample").tolist(), strict=True))


def by_key(samples: Batch) -> dict[tuple[int, int], list[int]]:
    return dict(zip(keys(samples), rows(samples), strict=True))


def partly(engine: RolloutEngine, texts: list[str], first: int, step: int, **options: Any) -> Generated:
    batch = prompts(engine.loaded, texts, first)
    return engine.generate_partial(batch, op(), seed=3, step=step, **options)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), parts=st.lists(st.integers(1, 20), max_size=4), most=st.sampled_from([4, 8, 256]))
def test_samples_in_parts_are_the_samples_in_one(
    kind: Any, parts: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped whenever so many samples are complete, and gone on with; in waves and at once."""
    monkeypatch.setattr(rollout, "_MAX_ROWS", most)
    engine = RolloutEngine(model(kind), "fp32")
    whole = engine.generate(prompts(engine.loaded), op(), seed=3, step=5)
    got = partly(engine, TEXTS, 0, 5, enough=lambda complete: False)
    assert by_key(got.finished) == by_key(whole)
    assert got.unfinished.rows == 0
    found: dict[tuple[int, int], list[int]] = {}
    begun = None
    for part in parts:
        got = partly(
            engine,
            [] if begun is not None else TEXTS,
            0,
            5 if begun is None else 6,
            begun=begun,
            enough=lambda complete, part=part: complete.sum() >= part,  # type: ignore[misc]
        )
        total = got.finished.rows + got.unfinished.rows
        assert got.finished.rows >= min(part, total)
        begun = got.unfinished
        found |= by_key(got.finished)
        for key, tokens in by_key(begun).items():
            assert by_key(whole)[key][: len(tokens)] == tokens
            assert len(tokens) < len(by_key(whole)[key])
        if not begun.rows:
            break
    rest = partly(engine, [] if begun is not None else TEXTS, 0, 5, begun=begun)
    assert found | by_key(rest.finished) == by_key(whole)
    assert set(rest.finished.array("step")) <= {5}


class Takes:
    """Asks when so many more samples are complete."""

    def __init__(self, parts: list[int]) -> None:
        self.parts = parts
        self.taken: list[Batch] = []

    def wanted(self, waiting: np.ndarray) -> bool:
        return bool(self.parts) and int(waiting.sum()) >= self.parts[0]

    def take(self, samples: Batch) -> None:
        self.parts.pop(0)
        self.taken.append(samples)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    parts=st.lists(st.integers(1, 9), max_size=4),
    stop=st.integers(1, 21),
    most=st.sampled_from([4, 8, 256]),
)
def test_samples_taken_out_of_a_call_disturb_no_others(
    kind: Any, parts: list[int], stop: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample comes once, bit for bit as undisturbed, out of a first call that is stopped and one that goes on
    beside new prompts."""
    monkeypatch.setattr(rollout, "_MAX_ROWS", most)
    engine = RolloutEngine(model(kind), "fp32")
    undisturbed = partly(engine, TEXTS, 0, 5, enough=lambda complete: complete.sum() >= stop)
    takes = Takes(parts)
    first = partly(engine, TEXTS, 0, 5, enough=lambda complete: complete.sum() >= stop, handover=takes)
    parts_of = [*takes.taken, first.finished]
    assert sum(part.rows for part in parts_of) == undisturbed.finished.rows
    assert [part.rows >= 1 for part in takes.taken] == [True] * len(takes.taken)
    found = Batch.concat(parts_of)
    order = {key: row for row, key in enumerate(keys(found))}
    found = found.select([order[key] for key in keys(undisturbed.finished)])
    for ours, theirs in ((found, undisturbed.finished), (first.unfinished, undisturbed.unfinished)):
        assert keys(ours) == keys(theirs)
        assert rows(ours) == rows(theirs)
        assert torch.equal(ours.packed("logprobs").values, theirs.packed("logprobs").values)
        assert ours.items("text") == theirs.items("text")
        assert ours.array("group").tolist() == theirs.array("group").tolist()
    again = Takes([1, 2])
    rest = partly(engine, ["8+8=", "4="], 10, 6, begun=first.unfinished, handover=again)
    whole = by_key(engine.generate(prompts(engine.loaded), op(), seed=3, step=5))
    whole |= by_key(engine.generate(prompts(engine.loaded, ["8+8=", "4="], 10), op(), seed=3, step=6))
    total: dict[tuple[int, int], list[int]] = {}
    for part in (*parts_of, *again.taken, rest.finished):
        assert not total.keys() & by_key(part).keys()
        total |= by_key(part)
    assert total == whole
    assert rest.unfinished.rows == 0


def test_unfinished_samples_go_on_beside_new_ones() -> None:
    old, new = model("qwen3"), model("qwen3", seed=1)
    engine = RolloutEngine(old, "fp32", own=True)
    first = partly(engine, TEXTS, 0, 5, enough=lambda complete: complete.sum() >= 8)
    assert first.unfinished.rows + first.finished.rows == 20
    load(engine, new, 1)
    second = partly(engine, ["8+8=", "4="], 10, 6, begun=first.unfinished)
    samples = second.finished
    assert samples.rows == first.unfinished.rows + 8
    carried = first.unfinished.rows
    assert samples.array("uid").tolist() == [*first.unfinished.array("uid"), *[10] * 4, *[11] * 4]
    assert samples.array("step").tolist() == [5] * carried + [6] * 8
    groups = samples.array("group")
    assert groups[carried:].tolist() == [groups[:carried].max() + 1] * 4 + [groups[:carried].max() + 2] * 4
    assert len(set(zip(groups.tolist(), samples.array("uid").tolist(), strict=True))) == len(set(groups.tolist()))
    fresh = RolloutEngine(new, "fp32").generate(prompts(new, ["8+8=", "4="], 10), op(), seed=3, step=6)
    assert rows(samples)[carried:] == rows(fresh)
    assert samples.array("version").tolist() == [0] * carried + [1] * 8  # the oldest
    trained = Trainer(new, "fp32").logprobs(samples, 1.0)
    for row, parts in enumerate(samples.items("versions")[:carried]):
        begun = len(first.unfinished.packed("response_ids").row(row))
        assert parts == (Segment(0, begun), Segment(1, len(rows(samples)[row]) - begun))
        made = samples.packed("logprobs").row(row)
        assert torch.equal(made[:begun], first.unfinished.packed("logprobs").row(row))
        torch.testing.assert_close(made[begun:], trained.row(row)[begun:], atol=2e-5, rtol=0)


def test_whole_groups_are_told_apart() -> None:
    engine = RolloutEngine(model("qwen3"), "fp32")

    def two_groups(complete: np.ndarray) -> bool:
        return int(complete.reshape(-1, 4).all(1).sum()) >= 2

    got = partly(engine, TEXTS, 0, 5, enough=two_groups)
    groups = got.by_group()
    assert groups.finished.rows >= 8
    assert groups.finished.rows + groups.unfinished.rows == 20
    assert set(groups.finished.array("uid")) & set(groups.unfinished.array("uid")) == set()
    assert groups.unfinished.rows > got.unfinished.rows  # complete samples wait for their groups
    after = partly(engine, [], 0, 9, begun=groups.unfinished)
    whole = by_key(engine.generate(prompts(engine.loaded), op(), seed=3, step=5))
    assert by_key(groups.finished) | by_key(after.finished) == whole
    assert after.by_group() is after


def test_an_abort_gives_what_there_is(aside: ThreadPoolExecutor) -> None:
    engine = RolloutEngine(model("qwen3"), "fp32")
    whole = by_key(engine.generate(prompts(engine.loaded), op(), seed=3, step=5))
    got = paused(engine, aside, 6, lambda: partly(engine, TEXTS, 0, 5), "abort").result(30)
    assert got.unfinished.rows
    assert {len(row) for row in rows(got.unfinished)} == {6}
    assert not got.unfinished.array("truncated").any()
    engine.resume()
    rest = partly(engine, [], 0, 6, begun=got.unfinished)
    assert by_key(got.finished) | by_key(rest.finished) == whole


def test_an_abort_of_a_call_that_needs_all(aside: ThreadPoolExecutor) -> None:
    engine = RolloutEngine(model("qwen3"), "fp32")
    future = paused(engine, aside, 6, lambda: sampled(engine), "abort")
    with pytest.raises(RunFailure, match="generate was aborted"):
        future.result(30)


def test_begun_samples_must_fit() -> None:
    engine = RolloutEngine(model("qwen3"), "fp32")
    got = partly(engine, TEXTS, 0, 5, enough=lambda complete: complete.sum() >= 10)
    nobody = prompts(engine.loaded, [])
    with pytest.raises(RunFailure, match="tokens, and max_new is 2"):
        engine.generate_partial(nobody, op(max_new=2), seed=3, step=6, begun=got.unfinished)
    with pytest.raises(RunFailure, match="multi-turn") as caught:
        engine.generate_partial(nobody, op(environment="game", turns=2), seed=3, step=6)
    assert caught.value.code == "RLF4003"
