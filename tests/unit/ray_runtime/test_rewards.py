"""Rewards: found by name, called by parameter names, and never a silent zero."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.data import open_data
from rlflow.backends.ray_runtime.rewards import RewardFunction, Sample, Scores, load_reward, score_rows
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import DatasetScorer, FileData, GymData, PythonReward

MODULE = """
import asyncio, os, re, time
import numpy as np
import neighbour

def exact(response, answer): return float(response == answer)
def by_all(prompt, completion, answer, record, tokens, level): return (
    prompt == "1+1=" and completion == "2" and record["level"] == level == 3 and list(tokens) == [5, 6])
def more(response, **columns): return {"score": len(columns), "level": columns["level"], "odd": [1]}
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "source": str(data_source), "info": extra_info is None}
def areal(prompt, completions, prompt_ids, completion_ids, **columns):
    return len(prompt_ids) + 10 * len(completion_ids) + 100 * (completions == columns["answer"])
def trl(prompts, completions, level, **columns):
    assert len(prompts) == len(completions) == len(level) == len(columns["answer"])
    return [float(c == a) for c, a in zip(completions, columns["answer"])]
def trl_chat(completions, **columns): return [len(c[0]["content"]) for c in completions]
def one_for_all(prompts, completions): return [1.0]
def scalar_for_all(prompts, completions): return 1.0
async def slowly(response):
    await asyncio.sleep(0.001)
    return neighbour.VALUE
def numpy_scalar(response): return np.float32(0.5)
def numpy_bool(response): return np.bool_(True)
def nan(response): return float("nan")
def text(response): return "1.0"
def a_list(response): return [1.0]
def no_score(response): return {"reward": 1.0}
def broken(response): return {}["missing key"]
def leaves(response): raise SystemExit(3)
def its_own_timeout(response): raise TimeoutError("the judge is away")
def wants_difficulty(response, dificulty): return 1.0
def nap(response):
    time.sleep(5 if response == "slow" else 0)
    return 1.0
def spin(response):
    while response == "slow": pass
    return 1.0
def backtrack(response):
    return float(re.match(r"(a+)+$", "a" * 64 + "b") is not None) if response == "slow" else 1.0
def crash(response): os._exit(7) if response == "slow" else None; return 1.0
CALLS = []
def second_time(response):
    CALLS.append(response)
    if len(CALLS) % 2: raise RuntimeError("not yet")
    return 1.0
def process(response): time.sleep(0.3); return os.getpid()
not_callable = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flow")
    (path / "scoring.py").write_text(MODULE)
    (path / "neighbour.py").write_text("VALUE = 0.25\n")
    (path / "broken_import.py").write_text("import neighbour\nimport no_such_package\n")
    (path / "leaving.py").write_text("import sys\nsys.exit(1)\n")
    (path / "syntax.py").write_text("def f(:\n")
    return path


def load(folder: Path, function: str) -> RewardFunction:
    return load_reward(PythonReward(function=f"scoring:{function}"), folder, {})


def sample(text: str, *, index: int = 0, prompt: Any = "1+1=", **columns: Any) -> Sample:
    record = {"prompt": prompt, "answer": "2", "level": 3, **columns}
    return Sample(17, index, record, text, prompt_ids=[1, 2, 3], response_ids=[5, 6])


def score(folder: Path, function: str, *texts: str, retries: int = 0, timeout: float = 5.0) -> Scores:
    rows = [sample(text, index=index) for index, text in enumerate(texts or ("2",))]
    return score_rows(load(folder, function), rows, retries, timeout)


def failure(folder: Path, function: str, *texts: str, **options: Any) -> RunFailure:
    with pytest.raises(RunFailure) as caught:
        score(folder, function, *texts, **options)
    return caught.value


# --- calling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("exact", 1.0),
        ("by_all", 1.0),
        ("compute_score", 1.0),
        ("areal", 123.0),
        ("trl", 1.0),
        ("slowly", 0.25),
        ("numpy_scalar", 0.5),
        ("numpy_bool", 1.0),
        ("second_time", 1.0),
    ],
)
def test_parameters_are_filled_by_name(folder: Path, function: str, expected: float) -> None:
    scores, _ = score(folder, function, retries=1)
    assert scores.dtype == np.float32
    assert scores.tolist() == [expected]


def test_scores_keep_the_order_of_the_samples(folder: Path) -> None:
    for function in ("exact", "trl"):
        assert score(folder, function, "2", "3", "2")[0].tolist() == [1.0, 0.0, 1.0]


def test_a_batched_function_gets_messages_for_a_chat(folder: Path) -> None:
    rows = [sample("four", prompt=[{"role": "user", "content": "hi"}])]
    assert score_rows(load(folder, "trl_chat"), rows, 0, 5.0)[0].tolist() == [4.0]


def test_extras_come_beside_the_score(folder: Path) -> None:
    assert score(folder, "compute_score", "2", "x")[1] == {"source": ["None", "None"], "info": [True, True]}
    scores, extras = score(folder, "more")
    assert scores.tolist() == [3.0]
    assert extras == {"level": [3], "odd": ['"[1]"']}


# --- failing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nan", "returned nan"),
        ("text", "returned str, not a number"),
        ("a_list", "returned list, not a number"),
        ("no_score", "a dict without `score`"),
        ("one_for_all", "returned 1 scores for 3 samples"),
        ("scalar_for_all", "returned float, not a list"),
    ],
)
def test_a_result_that_is_no_score_stops_the_run(folder: Path, function: str, says: str) -> None:
    error = failure(folder, function, "2", "3", "4", retries=3)
    assert error.code == "RLF5005"
    assert f"reward `scoring:{function}` " in error.message
    assert says in error.message


def test_a_raise_names_function_sample_and_cause(folder: Path) -> None:
    error = failure(folder, "broken", "x" * 5000)
    assert error.code == "RLF5003"
    assert error.message == "reward `scoring:broken` raised KeyError on sample 0 of the prompt with uid 17"
    assert error.notes[0] == 'prompt: "1+1="'
    assert error.notes[1].startswith('response: "xxx')
    assert error.notes[2] == 'answer: "2"'
    assert error.notes[-1] == "KeyError: 'missing key'"
    assert "in broken" in error.trace
    assert all(len(note) < 200 for note in error.notes)


@pytest.mark.parametrize(("function", "kind"), [("leaves", "SystemExit"), ("its_own_timeout", "TimeoutError")])
def test_other_ways_to_raise_are_raises_too(folder: Path, function: str, kind: str) -> None:
    error = failure(folder, function)
    assert error.code == "RLF5003"
    assert error.notes[-1].startswith(kind)


def test_a_failed_sample_is_tried_again_as_often_as_asked(folder: Path) -> None:
    assert score(folder, "second_time", "a", "b", retries=1)[0].tolist() == [1.0, 1.0]
    assert failure(folder, "second_time", retries=0).code == "RLF5003"


def test_a_hanging_sample_is_named_in_time(folder: Path) -> None:
    rows = [sample("fine"), sample("slow", index=4)]
    began = time.monotonic()
    with pytest.raises(RunFailure) as caught:
        score_rows(load(folder, "nap"), rows, 0, 0.3)
    assert time.monotonic() - began < 1.3
    assert caught.value.code == "RLF5004"
    assert "did not return within 0.3 s on sample 4 of the prompt with uid 17" in caught.value.message


def test_a_parameter_that_no_column_fills(folder: Path) -> None:
    with pytest.raises(RunFailure) as caught:
        score_rows(load(folder, "wants_difficulty"), [sample("2", difficulty=1)], 0, 5.0)
    assert caught.value.code == "RLF5014"
    assert "`dificulty`" in caught.value.message
    assert "did you mean `difficulty`?" in caught.value.help


# --- finding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "says", "hint"),
    [
        ("scoring:exat", "has no function `exat`", "did you mean `scoring:exact`?"),
        ("scoring:not_callable", "has no function `not_callable`", None),
        ("scorin:exact", "there is no module `scorin`", "did you mean `scoring`?"),
        ("no_such.module:f", "there is no module `no_such.module`", None),
        ("broken_import:f", "importing module `broken_import` failed", None),
        ("leaving:f", "importing module `leaving` failed", None),
        ("syntax:f", "importing module `syntax` failed", None),
        ("scoring", "not of the form `module:function`", None),
        ("builtins:divmod", "cannot be called with named arguments", None),
    ],
)
def test_a_function_that_cannot_be_had(folder: Path, function: str, says: str, hint: str | None) -> None:
    path = list(sys.path)
    with pytest.raises(RunFailure) as caught:
        load_reward(PythonReward(function=function), folder, {})
    assert caught.value.code == "RLF5014"
    assert says in caught.value.message
    if hint is not None:
        assert hint in caught.value.help
    assert sys.path == path


def test_a_failed_import_shows_its_cause(folder: Path) -> None:
    with pytest.raises(RunFailure) as caught:
        load_reward(PythonReward(function="broken_import:f"), folder, {})
    assert caught.value.notes[-1] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert "broken_import.py" in caught.value.trace


def test_two_flows_may_each_have_a_module_of_the_same_name(tmp_path: Path) -> None:
    path = list(sys.path)
    for name, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def f(response): return {value}\n")
    functions = [load_reward(PythonReward(function="mine:f"), tmp_path / name, {}) for name in ("one", "two")]
    assert [score_rows(f, [sample("x")], 0, 5.0)[0][0] for f in functions] == [1.0, 2.0]
    assert sys.path == path


def test_a_function_on_the_python_path_is_found(tmp_path: Path) -> None:
    loaded = load_reward(PythonReward(function="rlflow.diagnostics.diagnostic:did_you_mean"), tmp_path, {})
    assert loaded.required == {"word", "candidates"}


def test_the_scorer_of_reasoning_gym_reads_answer_tags_or_the_whole_response(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    source = GymData(task="basic_arithmetic", size=4)
    record = open_data(source, tmp_path, "sums").records[2]
    scorer = load_reward(DatasetScorer(data="sums"), tmp_path, {"sums": source})
    texts = [f" {record['answer']}\n", f"<think>0</think><answer>{record['answer']}</answer>.", "<answer>x</answer>"]
    scores, _ = score_rows(scorer, [Sample(0, 0, record, text) for text in texts], 0, 5.0)
    assert scores[:2].tolist() == [1.0, 1.0]
    assert scores[2] < 1.0


def test_a_file_has_no_scorer(tmp_path: Path) -> None:
    data = {"d": FileData(path="d.jsonl", format="jsonl")}
    with pytest.raises(RunFailure) as caught:
        load_reward(DatasetScorer(data="d"), tmp_path, data)
    assert caught.value.code == "RLF5015"


# --- worker processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_running() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if started:
        ray.shutdown()


def samples(*texts: str, group: int = 2) -> Batch:
    count = len(texts)
    records = [{"prompt": "1+1=", "answer": "2", "level": i // group} for i in range(count)]
    ids = Packed.from_rows([[5, 6]] * count, torch.int64)
    return Batch(
        count,
        {
            "uid": np.arange(count) // group,
            "sample": np.arange(count) % group,
            "record": records,
            "text": list(texts),
            "prompt_ids": ids,
            "response_ids": ids,
        },
    )


def pool(folder: Path, function: str, *, workers: int = 2, timeout: float = 5.0) -> Any:
    from rlflow.backends.ray_runtime.reward_worker import RewardPool

    source = PythonReward(function=f"scoring:{function}", timeout_us=int(timeout * 1e6))
    return RewardPool("mine", source, folder, {}, workers=workers)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_running")
class TestPool:
    def test_scores_come_back_in_order_with_extras(self, folder: Path) -> None:
        scoring = pool(folder, "compute_score")
        scores, extras = scoring.collect(scoring.start(samples("2", "x", "2", "2", "y")))
        assert scores.dtype == np.float32
        assert scores.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
        assert extras["info"] == [True] * 5
        empty, _ = scoring.collect(scoring.start(samples()))
        assert empty.shape == (0,)
        scoring.close()

    def test_workers_work_at_the_same_time(self, folder: Path) -> None:
        scoring = pool(folder, "process")
        scoring.open()
        began = time.monotonic()
        scores, _ = scoring.collect(scoring.start(samples("a", "b", "c", "d")))
        assert time.monotonic() - began < 1.1  # 4 x 0.3 s in series
        assert len(set(scores.tolist())) == 2
        scoring.close()

    def test_a_batched_function_sees_whole_groups(self, folder: Path) -> None:
        from rlflow.backends.ray_runtime.reward_worker import _samples, _split

        rows = _samples(samples(*"abcdef", group=3), with_tokens=True)
        assert rows[4].response_ids == [5, 6]
        assert _split(rows, 4, whole_groups=True) == [(0, 3), (3, 6)]
        assert _split(rows, 4, whole_groups=False) == [(0, 1), (1, 3), (3, 4), (4, 6)]
        scoring = pool(folder, "trl")
        assert scoring.collect(scoring.start(samples("2", "x", "2", "2")))[0].tolist() == [1.0, 0.0, 1.0, 1.0]
        scoring.close()

    @pytest.mark.parametrize("function", ["nap", "spin", "backtrack"])
    def test_a_hang_ends_in_time_and_names_the_sample(self, folder: Path, function: str) -> None:
        scoring = pool(folder, function, timeout=1.0)
        scoring.open()
        began = time.monotonic()
        with pytest.raises(RunFailure) as caught:
            scoring.collect(scoring.start(samples("a", "b", "c", "d", "e", "slow", "f", "g")))
        assert time.monotonic() - began < 3.0
        assert caught.value.code == "RLF5004"
        assert "did not return within 1 s on sample 1 of the prompt with uid 2" in caught.value.message
        if function == "backtrack":
            assert "in backtrack" in caught.value.trace
        # and the pool is good for the next samples
        assert scoring.collect(scoring.start(samples("a")))[0].tolist() == [1.0]
        scoring.close()

    def test_a_process_that_dies_is_a_failure_with_a_name(self, folder: Path) -> None:
        scoring = pool(folder, "crash")
        with pytest.raises(RunFailure) as caught:
            scoring.collect(scoring.start(samples("a", "slow")))
        assert caught.value.code == "RLF5011"
        assert "scoring:crash" in caught.value.message

    def test_a_raise_and_a_wrong_name_travel_back(self, folder: Path) -> None:
        scoring = pool(folder, "broken")
        with pytest.raises(RunFailure) as caught:
            scoring.collect(scoring.start(samples("a")))
        assert caught.value.code == "RLF5003"
        assert "in broken" in caught.value.trace
        with pytest.raises(RunFailure) as caught:
            pool(folder, "nowhere").open()
        assert caught.value.code == "RLF5014"

    def test_a_worker_does_not_load_torch(self, folder: Path) -> None:
        (folder / "loaded.py").write_text("import sys\ndef torch(response): return 'torch' in sys.modules\n")
        from rlflow.backends.ray_runtime.reward_worker import RewardPool

        scoring = RewardPool("mine", PythonReward(function="loaded:torch"), folder, {})
        assert scoring.collect(scoring.start(samples("a")))[0].tolist() == [0.0]
        scoring.close()
