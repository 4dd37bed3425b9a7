"""The working directory of a run: the plan, its sources, and the files that the flow names relative to itself."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from rlflow.diagnostics import RunFailure
from rlflow.ir.ops import FileData, HfModel, RewardModel
from rlflow.plan import Plan

LIMIT_BYTES: Final = 500 * 2**20
"""Ray refuses working directories from 512 MiB on."""
_SKIPPED: Final = frozenset({".git", "__pycache__", ".venv", "venv", ".ipynb_checkpoints"})
_LARGEST = 5
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""What a run looks for on the Hugging Face hub when there is no such folder."""


@dataclass(frozen=True)
class Bundle:
    """`plan` names its sources as they lie in the bundle; `files` maps a path in the bundle to what is copied there."""

    plan: Plan
    files: dict[str, Path]
    elsewhere: tuple[str, ...]
    """Absolute paths that the flow reads: not shipped, so every host must have them."""
    hub: tuple[str, ...]
    """Models by their names on the Hugging Face hub."""


def collect(plan: Plan, base_dir: Path, include: tuple[Path, ...] = ()) -> Bundle:
    """What the plan needs. `base_dir` is the folder of its .rlflow file. RLF1012 for a file that is not there, RLF4011
    when all together are too large."""
    base_dir = base_dir.absolute()
    first = Path(plan.sources[0].path)
    sources = {s.path: _normal(base_dir / os.path.relpath(s.path, first.parent)) for s in plan.sources}
    found: dict[Path, None] = dict.fromkeys(sources.values())
    elsewhere, hub = [], []
    for data in plan.data:
        if isinstance(data.source, FileData):
            if _is_absolute(data.source.path):
                elsewhere.append(data.source.path)
            else:
                found[_there(base_dir, data.source.path, f"data `{data.name}`")] = None
    for model in plan.models:
        if isinstance(model.source, HfModel | RewardModel):
            path = model.source.path
            if _is_absolute(path):
                elsewhere.append(path)
            elif (base_dir / path).is_dir():
                found |= dict.fromkeys(_below(_normal(base_dir / path)))
            elif _HUB_NAME.fullmatch(path):
                hub.append(path)
            else:
                raise _missing(base_dir, path, f"model `{model.name}`")
    found |= dict.fromkeys(_imported(base_dir, [path for path in found if path.suffix == ".py"]))
    for extra in include:
        file = _there(base_dir, str(extra), "--include")
        found |= dict.fromkeys(_below(file) if file.is_dir() else [file])
    _refuse_large({path: path.stat().st_size for path in found}, base_dir)
    root = Path(os.path.commonpath([base_dir, *(path.parent for path in found)]))
    files = {path.relative_to(root).as_posix(): path for path in sorted(found)}
    moved = {name: path.relative_to(root).as_posix() for name, path in sources.items()}
    return Bundle(_relocated(plan, moved), files, tuple(dict.fromkeys(elsewhere)), tuple(dict.fromkeys(hub)))


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "~"))


def _normal(path: Path) -> Path:
    """Without `..`, but links stay links: a path is where the flow says."""
    return Path(os.path.normpath(path))


def _there(base_dir: Path, path: str, who: str) -> Path:
    file = _normal(base_dir / path)
    if not file.exists():
        raise _missing(base_dir, path, who)
    return file


def _missing(base_dir: Path, path: str, who: str) -> RunFailure:
    return RunFailure(
        "RLF1012",
        f"{who} names `{path}`, which is not there to be shipped",
        notes=(f"looked at `{_normal(base_dir / path)}`",),
        help=("make it first, or name an absolute path that every host of the run sees",),
    )


def _below(folder: Path) -> Iterator[Path]:
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if name in _SKIPPED:
            continue
        if path.is_dir():
            yield from _below(path)
        elif path.is_file():
            yield path


def _imported(base_dir: Path, modules: list[Path]) -> list[Path]:
    """Python files beside the .rlflow file that the given ones import, and what those import."""
    found: dict[Path, None] = {}
    queue = list(modules)
    while queue:
        for name in _import_names(queue.pop()):
            top = base_dir / name
            files = list(_below(top)) if (top / "__init__.py").is_file() else [top.with_suffix(".py")]
            for file in files:
                if file.is_file() and file not in found and file not in modules:
                    found[file] = None
                    if file.suffix == ".py":
                        queue.append(file)
    return list(found)


def _import_names(file: Path) -> set[str]:
    """First words of absolute imports anywhere in the file; none where it is not Python, which the run will say."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _refuse_large(sizes: dict[Path, int], base_dir: Path) -> None:
    total = sum(sizes.values())
    if total > LIMIT_BYTES:
        raise too_large(total, LIMIT_BYTES, {os.path.relpath(path, base_dir): size for path, size in sizes.items()}, "")


def too_large(total: int, limit: int, sizes: dict[str, int], help: str) -> RunFailure:
    """RLF4011 with the largest of `sizes` (bytes by name)."""
    from rlflow.amounts import size

    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_LARGEST]
    return RunFailure(
        "RLF4011",
        f"what the plan needs is too large to be shipped with it: {size(total)}, and at most {size(limit)} can be",
        notes=tuple(f"`{name}`: {size(number)}" for name, number in largest),
        help=(
            help
            or "put models and data on storage that every host sees and name their absolute paths, as in "
            "`--set actor.path=/shared/model`",
        ),
    )


def _relocated(plan: Plan, moved: dict[str, str]) -> Plan:
    """The plan with the paths of its sources replaced, in spans too."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            new = {key: walk(item) for key, item in value.items()}
            if "file" in new and "end_column" in new:
                new["file"] = moved.get(new["file"], PurePosixPath(new["file"]).name)
            return new
        return [walk(item) for item in value] if isinstance(value, list) else value

    raw = walk(plan.model_dump(mode="json"))
    for source in raw["sources"]:
        source["path"] = moved[source["path"]]
    return Plan.model_validate(raw)
