"""A group on several ranks: every sample is made once and every number is the one of a single rank (H8, T1)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.ray_runtime.batch import Batch, Packed, Share
from rlflow.backends.ray_runtime.environment_worker import Observation, Turn
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.models import LoadedModel, load_model
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.stages import RUN
from rlflow.backends.ray_runtime.stages.call import Call, Frame
from rlflow.backends.ray_runtime.state import RankState
from rlflow.ir.ops import Generate, GroupNormalize, Op, ReinforcePp, Remax, Rloo, TinyModel
from rlflow.plan import Because, Plan, Pool, Program, RankPlace, Source, SpanRef, Stage, Stop

pytestmark = pytest.mark.usefixtures("one_thread")


# --- who has what -----------------------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))


@given(SIZES)
@settings(max_examples=150)
def test_samples_are_shared_out_evenly_and_in_order(sizes: tuple[int, int, int]) -> None:
    prompts, n, ranks = sizes
    prompts *= ranks // np.gcd(ranks, prompts * n)
    shares = [Share(prompts, rank, ranks) for rank in range(ranks)]
    assert [row for share in shares for row in share.samples(n)] == list(range(prompts * n))
    assert {len(share.samples(n)) for share in shares} == {prompts * n // ranks}
    assert [prompt for share in shares for prompt in share.begun] == list(range(prompts))
    for share in shares:
        assert list(share.touched) == sorted({row // n for row in share.samples(n)})
        assert list(share.begun) == [row // n for row in share.samples(n) if row % n == 0]


# --- generate ---------------------------------------------------------------------------------------------------------

TEXTS = ["1+2=", "34+5=", "7", "100+200+300=", "34+5=", "9+9="]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    found = load_model(TinyModel(architecture="qwen3", alphabet="0123456789+=;", hidden=32, context=96), Path())
    with torch.no_grad():  # random weights give nearly uniform tokens; larger ones make every token's odds differ
        for parameter in found.model.parameters():
            parameter.mul_(2.0)
    return found


class Game:
    """Observations of different lengths; some conversations end early."""

    name = "game"

    def step(self, turns: list[Turn]) -> list[Observation | None]:
        sizes = [(len(turn.text) + turn.number + turn.uid + turn.index) % 5 for turn in turns]
        return [None if size == 4 else Observation("0123456789;"[: size * 2]) for size in sizes]

    def forget(self) -> None:
        pass


def made(loaded: LoadedModel, prompts: int, n: int, ranks: int, turns: int) -> list[Batch]:
    """What every rank generates."""
    op = Generate(model="actor", n=n, max_new=20, environment="game" if turns > 1 else None, turns=turns)
    whole = Batch(
        prompts,
        {
            "uid": np.arange(50, 50 + prompts),
            "record": [{"prompt": text, "answer": None} for text in TEXTS[:prompts]],
            "prompt_ids": Packed.from_rows([loaded.encode(text) for text in TEXTS[:prompts]], torch.int64),
            "prompt_text": TEXTS[:prompts],
        },
    )
    out = []
    for rank in range(ranks):
        share = Share(prompts, rank, ranks)
        batch = whole.select(share.touched)
        batch.share = share if prompts % ranks else None
        environments: Any = Game()
        engine = RolloutEngine(loaded, "fp32")
        out.append(engine.generate(batch, op, seed=3, step=5, version=9, environments=environments))
    return out


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize(("prompts", "n", "ranks"), [(3, 4, 2), (3, 4, 6), (1, 6, 6), (1, 6, 2), (2, 6, 4), (5, 3, 3)])
def test_ranks_sample_what_one_rank_samples(loaded: LoadedModel, prompts: int, n: int, ranks: int, turns: int) -> None:
    parts = made(loaded, prompts, n, ranks, turns)
    (whole,) = made(loaded, prompts, n, 1, turns)
    assert [part.rows for part in parts] == [prompts * n // ranks] * ranks
    together = Batch.concat(parts)
    assert together.columns.keys() == whole.columns.keys()
    for name, column in whole.columns.items():
        found = together.columns[name]
        if isinstance(column, Packed):
            assert isinstance(found, Packed)
            assert found.offsets.tolist() == column.offsets.tolist(), name
            torch.testing.assert_close(found.values, column.values, rtol=1e-5, atol=1e-6)
        else:
            assert list(found) == list(column), name
    assert len({tuple(row.tolist()) for row in map(whole.packed("response_ids").row, range(whole.rows))}) > 1


# --- advantages -------------------------------------------------------------------------------------------------------

SPAN = SpanRef(file="a.rlflow", line=1, column=1, end_line=1, end_column=2)


class Meeting:
    """Threads that stand for ranks: what `Call.over_ranks` gives, without processes."""

    def __init__(self, ranks: int) -> None:
        self.said: list[list[float]] = [[]] * ranks
        self.barrier = threading.Barrier(ranks, timeout=5)

    def __call__(self, rank: int, numbers: list[float]) -> np.ndarray:
        self.said[rank] = list(numbers)
        self.barrier.wait()
        found = np.array(self.said, dtype=np.float64)
        self.barrier.wait()
        return found


class ThreadCall(Call):
    meet: Callable[[int, list[float]], np.ndarray]

    def over_ranks(self, numbers: list[float]) -> np.ndarray:
        return self.meet(self.state.rank, numbers)


def advantages(
    op: Op, rows: list[Batch], scores: list[np.ndarray], greedy: list[tuple[Batch, np.ndarray]]
) -> tuple[np.ndarray, dict[str, float]]:
    """One number per sample over all ranks, and the step's metrics."""
    ports = {"scores": "scores", **({"baseline": "baseline"} if isinstance(op, Remax) else {})}
    because = Because(reason="written", span=SPAN)
    stage = Stage(id="it", op=op, phase="step", pool="main", inputs=ports, output="", because=because)
    places = tuple(RankPlace(rank=rank, host="local", index=rank) for rank in range(len(rows)))
    plan = Plan(
        rlflow_version="0",
        flow="test",
        cluster="local",
        sources=(Source(path="a.rlflow", sha256="0"),),
        pipeline="",
        seed=0,
        stop=Stop(steps=1, epochs=None),
        data=(),
        models=(),
        rewards=(),
        pools=(Pool(name="main", device="cpu", ranks=places),),
        stages=(stage,),
        programs=(Program(pool="main", step=()),),
        channels=(),
    )
    meet = Meeting(len(rows))

    def one(rank: int) -> tuple[np.ndarray, dict[str, Any]]:
        frame = Frame()
        frame.values["scores"], frame.rows["scores"] = scores[rank], rows[rank]
        frame.rows["baseline"], frame.values["baseline"] = greedy[rank]
        metrics = StepMetrics(plan, "main", rank)
        state = RankState(plan, "main", rank, len(rows), Path(), seed=0)
        call = ThreadCall(stage, state, 1, metrics, frame, lambda _: frame)
        call.meet = meet
        found: Any = RUN[op.kind](call, op)
        return found, metrics.parts()

    with ThreadPoolExecutor(len(rows)) as ranks:
        parts = list(ranks.map(one, range(len(rows))))
    return np.concatenate([part for part, _ in parts]), reduce_parts([part for _, part in parts])


OPS: list[Op] = [
    GroupNormalize(),
    GroupNormalize(std=False),
    Rloo(),
    ReinforcePp(baseline=True),
    ReinforcePp(),
    Remax(),
]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_advantages_do_not_depend_on_the_split(data: Any) -> None:
    """H8: any split over 1, 2, 3, 4 and 6 ranks, with samples that have no reward, gives the same bits."""
    op = data.draw(st.sampled_from(OPS))
    ranks = data.draw(st.sampled_from([2, 3, 4, 6]))
    n = data.draw(st.integers(2, 6))
    step = ranks // int(np.gcd(ranks, n))
    prompts = step * data.draw(st.integers(1, 3))
    numbers = st.one_of(st.sampled_from([0.0, 1.0, float("nan")]), st.floats(-3, 3, width=32))
    values = np.array(data.draw(st.lists(numbers, min_size=prompts * n, max_size=prompts * n)), dtype=np.float32)
    if np.isnan(values).all():
        values[0] = 1.0
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=prompts * n, max_size=prompts * n))
    masked = data.draw(st.booleans())
    rows = Batch(
        prompts * n,
        {
            "uid": 100 + np.repeat(np.arange(prompts), n),
            "group": np.repeat(np.arange(prompts), n),
            "response_ids": Packed.from_rows([[5] * length for length in lengths], torch.int64),
        },
    )
    if masked:
        counted = [[1, *[i % 2 for i in range(length - 1)]] for length in lengths]
        rows = rows.with_columns(mask=Packed.from_rows(counted, torch.int64))
    greedy = Batch(prompts, {"uid": 100 + np.arange(prompts)})
    base = np.linspace(-1, 1, prompts).astype(np.float32)
    parts, own, bases = [], [], []
    for rank in range(ranks):
        share = Share(prompts, rank, ranks)
        part = rows.select(share.samples(n))
        part.share = share if prompts % ranks else None
        few = greedy.select(share.samples(1))
        few.share = part.share
        parts.append(part)
        own.append(values[share.samples(n)])
        bases.append((few, base[share.samples(1)]))
    whole, expected = advantages(op, [rows], [values], [(greedy, base)])
    found, metrics = advantages(op, parts, own, bases)
    if isinstance(op, ReinforcePp) and prompts % ranks == 0:
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)  # whole groups: moments are merged over ranks
    else:
        np.testing.assert_array_equal(found, whole)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_numbers_by_hand() -> None:
    """Two groups of three on three ranks of two: (0, 3, 0 | 1, 1, 4), by group, not by rank."""
    scores = np.array([0, 3, 0, 1, 1, 4], dtype=np.float32)
    rows = Batch(6, {"uid": np.repeat([7, 8], 3), "group": np.repeat([0, 1], 3)})
    nothing = (Batch(0, {}), np.zeros(0))
    parts = []
    for rank in range(3):
        part = rows.select([2 * rank, 2 * rank + 1])
        part.share = Share(2, rank, 3)
        parts.append(part)
    own = [scores[2 * rank : 2 * rank + 2] for rank in range(3)]
    found, metrics = advantages(GroupNormalize(std=False), parts, own, [nothing] * 3)
    assert found.tolist() == [-1, 2, -1, -1, -1, 2]
    found, _ = advantages(Rloo(), parts, own, [nothing] * 3)
    assert found.tolist() == [-1.5, 3, -1.5, -1.5, -1.5, 3]
    own[2] = np.array([np.nan, np.nan], dtype=np.float32)  # two of the second group have no reward
    found, metrics = advantages(Rloo(), parts, own, [nothing] * 3)
    np.testing.assert_array_equal(found, [-1.5, 3, -1.5, np.nan, np.nan, np.nan])
    assert metrics["critic/skipped_groups"] == 1  # counted once, though it lies on two ranks


def test_ranks_that_are_not_connected_are_an_error() -> None:
    part = Batch(2, {"uid": np.array([7, 7]), "group": np.array([0, 0])}, Share(1, 0, 2))
    with pytest.raises(ValueError, match="2 ranks share groups, and 1 are connected"):
        advantages(Rloo(), [part], [np.array([0.0, 1.0])], [(Batch(0, {}), np.zeros(0))])
