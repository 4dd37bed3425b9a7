"""Environments: finding the class, the calls and their deadlines, worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.backends.ray_runtime.environment_worker import LocalEnvironments, Observation, Turn, load_environment
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.sources import PythonEnvironment

GAMES = '''\
"""Environments for the tests."""

import re
import time


class Echo:
    closed = []

    def reset(self, record):
        self.word = record["prompt"]
        self.count = 0

    def step(self, text):
        self.count += 1
        return None if text == "stop" else f"{self.word}:{text}:{self.count}"

    def close(self):
        Echo.closed.append(self.word)


class Bare:
    role = "tool"

    def step(self, text):
        return text.upper()


class Broken:
    def __init__(self):
        self.made = True

    def reset(self, record):
        if record["prompt"] == "no reset":
            raise KeyError("lost")

    def step(self, text):
        if text == "raise":
            raise ValueError("what is this?")
        if text == "exit":
            raise SystemExit(3)
        if text == "number":
            return 7
        if text == "sleep":
            time.sleep(60)
        if text == "hold":
            re.match(r"(a+)+$", "a" * 40 + "b")
        if text == "crash":
            import os
            os._exit(9)
        return "fine"


class Unmade:
    def __init__(self, size):
        pass

    def step(self, text):
        return None


class NoStep:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "games.py").write_text(GAMES, "utf-8")
    (tmp_path / "failing.py").write_text("import no_such_package\n", "utf-8")
    return tmp_path


def turn(text: str, key: int = 0, number: int = 1, prompt: str = "hello") -> Turn:
    return Turn(key, 40 + key, key % 2, number, {"prompt": prompt}, text)


def local(folder: Path, name: str, timeout: float = 5.0) -> LocalEnvironments:
    return LocalEnvironments(PythonEnvironment(target=f"games:{name}", timeout_us=int(timeout * 1e6)), folder)


def test_every_sample_has_its_own_instance(folder: Path) -> None:
    games = local(folder, "Echo")
    assert games.step([turn("a", 0), turn("b", 1, prompt="bye")]) == [Observation("hello:a:1"), Observation("bye:b:1")]
    assert games.step([turn("c", 1, 2, "bye"), turn("d", 0, 2)]) == [Observation("bye:c:2"), Observation("hello:d:2")]
    assert games.step([turn("stop", 1, 3, "bye")]) == [None]
    assert [left.key for left in games.left()] == [0]


def test_instances_are_closed_once(folder: Path) -> None:
    games = local(folder, "Echo")
    closed = games._make.closed  # type: ignore[attr-defined]
    games.step([turn("a", 0, prompt="first"), turn("stop", 1, prompt="second"), turn("b", 2, prompt="third")])
    assert closed == ["second"]
    games.step([turn("c", 0, prompt="fourth")])  # a new episode under the same key
    assert closed == ["second", "first"]
    games.forget()
    games.forget()
    assert sorted(closed) == ["first", "fourth", "second", "third"]


def test_reset_and_close_may_be_missing_and_the_role_may_be_named(folder: Path) -> None:
    games = local(folder, "Bare")
    assert games.step([turn("a")]) == [Observation("A", "tool")]
    games.forget()


@pytest.mark.parametrize(
    ("text", "prompt", "words", "cause"),
    [
        ("raise", "hello", "raised ValueError on turn 1 of sample 1 of the prompt with uid 43", "what is this?"),
        ("exit", "hello", "raised SystemExit", "SystemExit: 3"),
        ("fine", "no reset", "raised KeyError in `reset` on turn 1", "KeyError: 'lost'"),
        ("number", "hello", 'returned int, neither a string nor None: "7",', ""),
    ],
)
def test_a_failure_names_environment_sample_and_cause(
    folder: Path, text: str, prompt: str, words: str, cause: str
) -> None:
    with pytest.raises(RunFailure) as caught:
        local(folder, "Broken").step([turn("fine", 2), turn(text, 3, prompt=prompt)])
    failure = caught.value
    assert failure.code == "RLF5017"
    assert failure.message.startswith("environment `games:Broken` " + words)
    assert failure.notes[:2] == (f'prompt: "{prompt}"', f'the model\'s turn: "{text}"')
    assert cause in "".join(failure.notes[2:])
    assert ("games.py" in failure.trace) == bool(cause)


def test_a_class_that_needs_arguments(folder: Path) -> None:
    with pytest.raises(RunFailure, match="raised TypeError when made") as caught:
        local(folder, "Unmade").step([turn("a")])
    assert caught.value.code == "RLF5017"


def test_a_hanging_step_is_named_in_time(folder: Path) -> None:  # K2
    started = time.monotonic()
    with pytest.raises(RunFailure) as caught:
        local(folder, "Broken", timeout=0.2).step([turn("fine", key) for key in range(7)] + [turn("sleep", 7)])
    assert time.monotonic() - started < 2
    assert "did not return within 0.2 s on turn 1 of sample 1 of the prompt with uid 47" in caught.value.message
    assert caught.value.code == "RLF5017"
    assert "timeout" in caught.value.help[0]


@pytest.mark.parametrize(
    ("target", "words", "hint"),
    [
        ("games", "not of the form `module:Class`", None),
        ("games:Eco", "has no class `Eco`", "games:Echo"),
        ("games:NoStep", "has no method `step`", "def step"),
        ("gams:Echo", "environment `gams:Echo`: there is no module `gams`", "games"),
        ("failing:Any", "environment `failing:Any`: importing module `failing` failed", None),
    ],
)
def test_a_class_that_cannot_be_had(folder: Path, target: str, words: str, hint: str | None) -> None:
    with pytest.raises(RunFailure) as caught:
        load_environment(PythonEnvironment(target=target), folder)
    assert caught.value.code == "RLF5014"
    assert words in caught.value.message
    assert hint is None or hint in caught.value.help[0]


def test_the_examples_calculator() -> None:
    from rlflow.backends.ray_runtime.python_modules import load_module

    folder = Path(__file__).parents[3] / "examples"
    calculator = LocalEnvironments(PythonEnvironment(target="environments:Calculator"), folder)
    texts = ["?", "12+7?", "3*4?", "2-5?", "x?", "19"]
    answers = calculator.step([turn(text, key, prompt="37+58=") for key, text in enumerate(texts)])
    assert [None if answer is None else answer.text for answer in answers] == ["95;", "19;", "12;", "-3;", ";", None]
    module: Any = load_module("reward `environments:answer_after_tool`", "environments", folder)
    assert module.answer_after_tool("?95;95", "95") == {"score": 1.0, "exact": True, "asked": True}
    assert module.answer_after_tool("?4;95", "95") == {"score": 0.8, "exact": True, "asked": False}
    assert module.answer_after_tool("?95;", "95")["score"] == 0.2
    assert module.exact_after_tool("95", "95") == 1.0


# --- processes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_running() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    if started:
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_running")
class TestPool:
    def pool(self, folder: Path, name: str, timeout: float = 5.0, workers: int = 2) -> Any:
        from rlflow.backends.ray_runtime.environments import EnvironmentPool

        source = PythonEnvironment(target=f"games:{name}", timeout_us=int(timeout * 1e6))
        return EnvironmentPool("game", source, folder, workers=workers)

    def test_episodes_stay_with_their_worker(self, folder: Path) -> None:
        pool = self.pool(folder, "Echo")
        first = pool.step([turn("a", key) for key in (4, 1, 0)])
        assert [answer.text for answer in first] == ["hello:a:1"] * 3
        second = pool.step([turn("b", 0, 2), turn("stop", 1, 2), turn("c", 4, 2)])
        assert [answer and answer.text for answer in second] == ["hello:b:2", None, "hello:c:2"]
        pool.forget()
        pool.forget()
        pool.close()

    def test_the_cost_of_a_turn(self, folder: Path) -> None:
        pool = self.pool(folder, "Echo")
        pool.step([turn("a", key) for key in range(256)])
        started = time.monotonic()
        for number in range(2, 12):
            pool.step([turn("a", key, number) for key in range(256)])
        assert (time.monotonic() - started) / 10 < 0.5  # about 0.02 s on a quiet machine
        pool.close()

    @pytest.mark.parametrize(("text", "timeout"), [("sleep", 0.3), ("hold", 0.3), ("raise", 5.0)])
    def test_a_failure_ends_the_workers_and_not_the_run(self, folder: Path, text: str, timeout: float) -> None:
        pool = self.pool(folder, "Broken", timeout)
        pool.open()
        started = time.monotonic()
        with pytest.raises(RunFailure) as caught:
            pool.step([turn("fine", key) for key in range(7)] + [turn(text, 7)])
        assert time.monotonic() - started < 8
        assert caught.value.code == "RLF5017"
        assert "sample 1 of the prompt with uid 47" in caught.value.message
        assert "game" in caught.value.trace
        assert pool.step([turn("fine")]) == [Observation("fine")]  # new workers
        pool.close()

    def test_a_crash_is_a_failure(self, folder: Path) -> None:
        pool = self.pool(folder, "Broken")
        with pytest.raises(RunFailure, match="died on sample 1 of the prompt with uid 47") as caught:
            pool.step([turn("fine", 5), turn("crash", 7)])
        assert caught.value.code == "RLF5011"

    def test_a_class_that_cannot_be_had(self, folder: Path) -> None:
        with pytest.raises(RunFailure) as caught:
            self.pool(folder, "Nothing").open()
        assert caught.value.code == "RLF5014"
