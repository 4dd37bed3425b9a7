"""Running environments: one instance per episode, every call with a deadline. No torch and no ray here.

A class `module:Class` is found as a reward's function is. Its instances are made without arguments, one per sample:

  reset(record)   optional; before the first step, with the data row
  step(text)      after every turn of the model, with the turn's text; returns what the model reads next, or None when
                  the episode is over
  close()         optional; once, when no further step will come
  role            optional attribute: the role of the observation's message in a chat, "user" unless set

Whatever goes wrong is a failure of the run (RLF5017): an episode that ended silently would be trained on as if the
model had ended it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlflow.backends.ray_runtime.call_thread import CallThread, Expired
from rlflow.backends.ray_runtime.data_sources import describe, shorten
from rlflow.backends.ray_runtime.python_modules import load_module
from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean, one_of
from rlflow.ir.sources import PythonEnvironment


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one sample, as the environment gets it. `uid` and `index` name the sample in messages."""

    key: int
    """The sample's number in the batch; its instance is kept under it."""
    uid: int
    index: int
    number: int
    """1 for the first turn of an episode"""
    record: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model reads next, and as whose message in a chat."""

    text: str
    role: str = "user"


class Environments(Protocol):
    """Many episodes side by side."""

    name: str

    def step(self, turns: Sequence[Turn]) -> list[Observation | None]:
        """The answers to these turns; None where the episode is over. Raises RunFailure RLF5017."""

    def forget(self) -> None:
        """Close what is left of all episodes."""


def load_environment(source: PythonEnvironment, base_dir: Path) -> Callable[[], Any]:
    """The class that `source` names, from `base_dir` or the Python path. RunFailure RLF5014 when it cannot be used."""
    module_name, _, class_name = source.target.partition(":")
    if not module_name or not class_name:
        raise RunFailure("RLF5014", f"environment `{source.target}` is not of the form `module:Class`")
    module = load_module(f"environment `{source.target}`", module_name, base_dir)
    found = getattr(module, class_name, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if isinstance(value, type) and hasattr(value, "step")]
        near = did_you_mean(class_name, names)
        raise RunFailure(
            "RLF5014",
            f"environment `{source.target}`: module `{module_name}` has no class `{class_name}`",
            notes=(f"the module is `{module.__file__}`", f"it has {one_of(sorted(names)[:10]) or 'no environments'}"),
            help=() if near is None else (f"did you mean `{module_name}:{near}`?",),
        )
    if isinstance(found, type) and not callable(getattr(found, "step", None)):
        raise RunFailure(
            "RLF5014",
            f"environment `{source.target}` has no method `step`",
            help=("give the class `def step(self, text: str) -> str | None`",),
        )
    loaded: Callable[[], Any] = found
    return loaded


class LocalEnvironments:
    """Episodes in this process. After a failure by timeout a thread is still in the user's code."""

    def __init__(self, source: PythonEnvironment, base_dir: Path) -> None:
        self.name = source.target
        self._make = load_environment(source, base_dir)
        self._timeout = source.timeout_us / 1e6
        self._thread = CallThread("environment")
        self._instances: dict[int, tuple[Any, Turn]] = {}

    def step(self, turns: Sequence[Turn], on_start: Callable[[int], None] | None = None) -> list[Observation | None]:
        """See `Environments`. `on_start(i)` is told before each call for turn i."""
        answers: list[Observation | None] = []
        for index, turn in enumerate(turns):
            begin = partial(on_start, index) if on_start is not None else _nothing
            answers.append(self._answer(turn, begin))
        return answers

    def forget(self, on_start: Callable[[int], None] | None = None) -> None:
        for index, key in enumerate(list(self._instances)):
            self._close(key, partial(on_start, index) if on_start is not None else _nothing)

    def left(self) -> list[Turn]:
        """The last turns of the episodes that are not closed, in the order in which `forget` closes them."""
        return [turn for _, turn in self._instances.values()]

    def stop(self) -> None:
        """End the thread; no call may follow."""
        self._thread.stop()

    def _answer(self, turn: Turn, begin: Callable[[], None]) -> Observation | None:
        if turn.number == 1:
            self._close(turn.key, begin)  # an episode that its batch did not finish
            instance = self._call("constructor", self._make, turn, begin)
            self._instances[turn.key] = instance, turn
            if hasattr(instance, "reset"):
                self._call("reset", partial(instance.reset, turn.record), turn, begin)
        instance = self._instances[turn.key][0]
        self._instances[turn.key] = instance, turn
        result = self._call("step", partial(instance.step, turn.text), turn, begin)
        if result is None:
            self._close(turn.key, begin)
            return None
        if not isinstance(result, str):
            what = f"returned {type(result).__name__}, neither a string nor None: {shorten(result)},"
            raise environment_failed(self.name, what, turn)
        return Observation(result, str(getattr(instance, "role", "user")))

    def _close(self, key: int, begin: Callable[[], None]) -> None:
        if key in self._instances:
            instance, turn = self._instances.pop(key)
            if hasattr(instance, "close"):
                self._call("close", instance.close, turn, begin)

    def _call(self, method: str, function: Callable[[], Any], turn: Turn, begin: Callable[[], None]) -> Any:
        begin()
        where = "" if method == "step" else f" in `{method}`" if method != "constructor" else " when made"
        try:
            return self._thread.call(function, self._timeout)
        except Expired:
            trace = self._thread.where()
            self._thread = CallThread("environment")
            raise timed_out(self.name, turn, self._timeout, where, trace) from None
        except BaseException as error:  # user code may raise anything, SystemExit too
            if isinstance(error, KeyboardInterrupt):
                raise
            trace = "".join(traceback.format_exception(error))
            what = f"raised {type(error).__name__}{where}"
            raise environment_failed(self.name, what, turn, cause=describe(error), trace=trace) from None


def environment_failed(name: str, what: str, turn: Turn, *, cause: str = "", trace: str = "") -> RunFailure:
    """RLF5017 with the sample that it happened on."""
    notes = [
        f"prompt: {shorten(turn.record.get('prompt', ''))}",
        f"the model's turn: {shorten(turn.text)}",
        *([cause] if cause else []),
    ]
    where = f"turn {turn.number} of sample {turn.index} of the prompt with uid {turn.uid}"
    return RunFailure("RLF5017", f"environment `{name}` {what} on {where}", notes=notes, trace=trace)


def timed_out(name: str, turn: Turn, timeout: float, where: str = "", trace: str = "") -> RunFailure:
    """RLF5017 for a call that did not come back."""
    failure = environment_failed(name, f"did not return within {timeout:g} s{where}", turn, trace=trace)
    failure.help = ("raise the environment's `timeout`, or make it give up by itself",)
    return failure


def _nothing() -> None:
    pass
