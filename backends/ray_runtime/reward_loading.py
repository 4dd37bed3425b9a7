"""Finding the reward function that a flow names. Nothing here needs torch or ray."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlflow.backends.ray_runtime.data_sources import describe, package
from rlflow.backends.ray_runtime.python_modules import load_module
from rlflow.backends.ray_runtime.reward_functions import RewardFunction
from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean, one_of
from rlflow.ir.ops import DatasetScorer, DataSource, GymData, PythonReward, RewardSource


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
    module = load_module(f"reward `{source.function}`", module_name, base_dir)
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
