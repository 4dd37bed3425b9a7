"""Importing the Python modules that a flow names, without leaving traces. Nothing here needs torch or ray."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from rlflow.backends.ray_runtime.data_sources import describe
from rlflow.diagnostics.diagnostic import RunFailure, did_you_mean


def load_module(what: str, name: str, base_dir: Path) -> ModuleType:
    """Import `name`, `base_dir` being on sys.path only meanwhile.

    So the module's own top-level imports find their neighbours, an import inside a function does not. A file beside
    the .rlflow file is run afresh under its name, and sys.modules keeps what it had there: two flows in different
    folders may both have a `rewards.py`. `what` begins messages: "reward `rewards:exact`". Raises RLF5014.
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
        raise _import_failure(what, name, base_dir, error) from None
    finally:
        sys.path.remove(str(base_dir))
        if file is not None and before is not None:
            sys.modules[name] = before


def _import_failure(what: str, name: str, base_dir: Path, error: BaseException) -> RunFailure:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (name == missing or name.startswith(f"{missing}.")):
        near = did_you_mean(name, [path.stem for path in base_dir.glob("*.py")])
        return RunFailure(
            "RLF5014",
            f"{what}: there is no module `{name}`",
            notes=(f"looked in `{base_dir}` and on the Python path",),
            help=() if near is None else (f"did you mean `{near}`?",),
        )
    return RunFailure(
        "RLF5014",
        f"{what}: importing module `{name}` failed",
        notes=(describe(error),),
        trace="".join(traceback.format_exception(error)),
    )
