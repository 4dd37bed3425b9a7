"""Starting the processes that run user code: the same for rewards and environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from rlflow.backends.ray_runtime.data_sources import describe
from rlflow.diagnostics.diagnostic import RunFailure


def load_all(actors: Sequence[Any], what: str, timeout: float, module: str) -> list[Any]:
    """What `load` of every actor gives. `what` is such as "reward `exact`", `module` whose import may hang.

    Raises RunFailure: the first that `load` gave, RLF5008 after `timeout` seconds, RLF5011 for a worker that died. The
    caller ends the workers.
    """
    try:
        results = ray.get([actor.load.remote() for actor in actors], timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise RunFailure(
            "RLF5008",
            f"the {len(actors)} workers of {what} did not start within {timeout:g} s",
            notes=(f"either the machine is busy or has no room for them, or importing {module} hangs",),
        ) from None
    except ray.exceptions.RayError as error:
        raise RunFailure("RLF5011", f"a worker of {what} died while starting", notes=(describe(error),)) from None
    for result in results:
        if isinstance(result, RunFailure):
            raise result
    return list(results)
