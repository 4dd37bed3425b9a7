"""Finding a reward function and calling it by the names of its parameters. Nothing here needs torch or ray.

A function gets what its parameters are called; every name is optional, `**columns` gets the data row's columns:

  per sample   prompt: as in the data, a string or messages · response, completion, completions, solution_str: the
               decoded response · answer, ground_truth: the answer column · record: the whole data row · tokens,
               completion_ids: the response's token ids · prompt_ids · any column of the data by its name
  batched      a function with `prompts`, or with `completions` but no `prompt`: lists over samples of `prompts`,
               `completions`, `prompt_ids`, `completion_ids` and of every column, whole groups together. A completion is
               a string for a string prompt and [{"role": "assistant", "content": ...}] for messages

These cover verl (`data_source, solution_str, ground_truth, extra_info`), AReaL (`prompt, completions, prompt_ids,
completion_ids, **columns`) and TRL (`prompts, completions, **columns`). A coroutine function is run to its end.

A score is a number or a bool, or a dict with the number under `score` and extras beside it (numbers,
bools and text; anything else is kept as text).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlflow.backends.ray_runtime.data_sources import describe, package, shorten
from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean, one_of
from rlflow.ir.ops import DatasetScorer, DataSource, GymData, PythonReward, RewardSource


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reward may see of one sample. `uid` and `index` (place in the group) only name it in messages."""

    uid: int
    index: int
    record: dict[str, Any]
    text: str
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()


Scored = tuple[float, dict[str, Any]]
"""A finite score and the extras beside it."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward that was found: `score` calls it on samples.

    `names` are its parameters that can be given by name, `required` those without a default; `columns` says that it
    takes **keywords.
    """

    name: str
    function: Callable[..., Any]
    names: frozenset[str]
    required: frozenset[str]
    columns: bool

    @property
    def batched(self) -> bool:
        """Takes lists over samples, and wants whole groups in one call."""
        return "prompts" in self.names or ("completions" in self.names and "prompt" not in self.names)

    @property
    def wants_tokens(self) -> bool:
        return bool(self.names & {"tokens", "completion_ids", "prompt_ids"})

    def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """The samples' scores. Raises what the function raises, and RunFailure RLF5005 for a result that is none,
        RLF5014 for a parameter that no column fills."""
        if not self.batched:
            return [self._scored(self._call(self._sample_arguments(sample))) for sample in samples]
        results = self._call(self._batch_arguments(samples))
        if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
            raise self._wrong_result(f"returned {type(results).__name__}, not a list with one score per sample")
        if len(results) != len(samples):
            raise self._wrong_result(f"returned {len(results)} scores for {len(samples)} samples")
        return [self._scored(result) for result in results]

    def _call(self, arguments: dict[str, Any]) -> Any:
        result = self.function(**arguments)
        return asyncio.run(_finish(result)) if inspect.isawaitable(result) else result

    def _sample_arguments(self, sample: Sample) -> dict[str, Any]:
        record = sample.record
        offered: dict[str, Any] = {
            **dict.fromkeys(("data_source", "extra_info")),
            **record,
            **dict.fromkeys(("response", "completion", "completions", "solution_str"), sample.text),
            **dict.fromkeys(("answer", "ground_truth"), record["answer"]),
            **dict.fromkeys(("tokens", "completion_ids"), sample.response_ids),
            "prompt_ids": sample.prompt_ids,
            "record": record,
        }
        return self._arguments(offered, record)

    def _batch_arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        records = [sample.record for sample in samples]
        columns = {name: [record.get(name) for record in records] for record in records for name in record}
        offered: dict[str, Any] = {
            **columns,
            "prompts": [record["prompt"] for record in records],
            "completions": [
                sample.text
                if isinstance(sample.record["prompt"], str)
                else [{"role": "assistant", "content": sample.text}]
                for sample in samples
            ],
            "prompt_ids": [sample.prompt_ids for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
        }
        return self._arguments(offered, columns)

    def _arguments(self, offered: dict[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        missing = sorted(self.required - offered.keys())
        if missing:
            near = did_you_mean(missing[0], offered)
            raise RunFailure(
                "RLF5014",
                f"reward `{self.name}` has a parameter `{missing[0]}`, but the data has no such column",
                notes=("columns present: " + ", ".join(f"`{name}`" for name in columns),),
                help=() if near is None else (f"did you mean `{near}`?",),
            )
        arguments = {name: offered[name] for name in self.names if name in offered}
        return {**columns, **arguments} if self.columns else arguments

    def _scored(self, result: Any) -> Scored:
        extras: dict[str, Any] = {}
        if isinstance(result, Mapping):
            if "score" not in result:
                raise self._wrong_result(f"returned a dict without `score`: {shorten(dict(result))}")
            extras = {str(key): _plain(value) for key, value in result.items() if key != "score"}
            result = result["score"]
        if result is None:
            raise self._wrong_result("returned None, but every sample needs a score")
        result = _plain(result)
        if not isinstance(result, numbers.Real):
            raise self._wrong_result(f"returned {type(result).__name__}, not a number: {shorten(result)}")
        score = float(result)
        if not math.isfinite(score):
            raise self._wrong_result(f"returned {score}, which is not a finite number")
        simple = (bool, int, float, str, type(None))
        return score, {key: value if isinstance(value, simple) else shorten(value) for key, value in extras.items()}

    def _wrong_result(self, what: str) -> RunFailure:
        return RunFailure(
            "RLF5005",
            f"reward `{self.name}` {what}",
            help=('return a number, or {"score": number, ...}, for every sample',),
        )


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any) -> Any:
    """The number in a numpy scalar or a zero-dimensional array or tensor; any other value as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def load_reward(source: RewardSource, base_dir: Path, data: Mapping[str, DataSource]) -> RewardFunction:
    """The function that `source` names. A module is looked for in `base_dir` first, then on the Python path.

    `data`: the flow's data declarations by name, for a reward that a data set brings itself. Raises RunFailure
    RLF5014 (RLF5012 for a missing package, RLF5015 for a data set without a scorer).
    """
    if isinstance(source, DatasetScorer):
        return _load_scorer(source, data)
    module_name, _, function_name = source.function.partition(":")
    if not module_name or not function_name:
        raise RunFailure("RLF5014", f"reward `{source.function}` is not of the form `module:function`")
    module = _load_module(source, module_name, base_dir)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = did_you_mean(function_name, names)
        raise RunFailure(
            "RLF5014",
            f"reward `{source.function}`: module `{module_name}` has no function `{function_name}`",
            notes=(f"the module is `{module.__file__}`", f"it has {one_of(sorted(names)[:10]) or 'no functions'}"),
            help=() if near is None else (f"did you mean `{module_name}:{near}`?",),
        )
    return _inspected(source, function)


def _inspected(source: PythonReward, function: Callable[..., Any]) -> RewardFunction:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise RunFailure(
            "RLF5014",
            f"reward `{source.function}` cannot be called with named arguments",
            help=("write a Python function with parameters such as `response` and `answer`",),
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return RewardFunction(
        source.function,
        function,
        frozenset(p.name for p in named),
        frozenset(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _load_module(source: PythonReward, name: str, base_dir: Path) -> ModuleType:
    """Import `name`, `base_dir` being on sys.path only meanwhile.

    So the module's own top-level imports find their neighbours, an import inside a function does not. A file beside
    the .rlflow file is run afresh under its name, and sys.modules keeps what it had there: two flows in different
    folders may both have a `rewards.py`.
    """
    stem = base_dir.joinpath(*name.split("."))
    file = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
    before = sys.modules.get(name)
    sys.path.insert(0, str(base_dir))
    importlib.invalidate_caches()
    try:
        if file is None or "." in name:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look their module up while it runs
        spec.loader.exec_module(module)
        return module
    except BaseException as error:  # a module may also call sys.exit
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _import_failure(source, name, base_dir, error) from None
    finally:
        sys.path.remove(str(base_dir))
        if file is not None and before is not None:
            sys.modules[name] = before


def _import_failure(source: PythonReward, name: str, base_dir: Path, error: BaseException) -> RunFailure:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (name == missing or name.startswith(f"{missing}.")):
        near = did_you_mean(name, [path.stem for path in base_dir.glob("*.py")])
        return RunFailure(
            "RLF5014",
            f"reward `{source.function}`: there is no module `{name}`",
            notes=(f"looked in `{base_dir}` and on the Python path",),
            help=() if near is None else (f"did you mean `{near}`?",),
        )
    return RunFailure(
        "RLF5014",
        f"reward `{source.function}`: importing module `{name}` failed",
        notes=(describe(error),),
        trace="".join(traceback.format_exception(error)),
    )


def _load_scorer(source: DatasetScorer, data: Mapping[str, DataSource]) -> RewardFunction:
    """reasoning-gym's own scorer of the task, given the data row and the answer taken out of the response.

    The answer is the text of the response's last `<answer>...</answer>`, or without such tags the whole response;
    either way without white space around it.
    """
    declared = data[source.data]
    if not isinstance(declared, GymData):
        raise RunFailure("RLF5015", f"data `{source.data}` brings no scorer; only reasoning-gym data does")
    gym = package("reasoning_gym", "examples")
    try:
        dataset = gym.create_dataset(declared.task, size=1, seed=declared.seed, **dict(declared.options))
    except Exception as error:
        raise RunFailure(
            "RLF5015",
            f"data `{source.data}`: reasoning-gym cannot make the scorer of task `{declared.task}`",
            notes=(describe(error),),
            trace=traceback.format_exc(),
        ) from None

    def score_answer(response: str, record: dict[str, Any]) -> Any:
        found = gym.utils.extract_answer(response)
        return dataset.score_answer(answer=(response if found is None else found).strip(), entry=record)

    names = frozenset(("response", "record"))
    return RewardFunction(f"{source.data}.scorer", score_answer, names, names, columns=False)
