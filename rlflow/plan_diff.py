"""What differs between two plans, by name rather than by place in a list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.plan import Plan

_NAMES = ("name", "id", "pool", "path", "model", "stage", "object", "what", "rank")
"""Keys that name an entry of a list, the first that it has."""
_IGNORED = frozenset({"span", "because"})
"""Where something was written, which changes with every edit of the text above it."""


@dataclass(frozen=True, slots=True)
class Change:
    """`path` such as `stages[samples].layout.tp`; `before` or `after` is None where the entry is new or gone."""

    path: str
    kind: Literal["added", "removed", "changed", "moved"]
    before: Any
    after: Any

    @property
    def section(self) -> str:
        """The plan's part: what stands before the first dot or bracket."""
        return self.path.replace("[", ".").split(".")[0]


def plan_changes(before: Plan, after: Plan) -> list[Change]:
    """Every difference, in the order of the plan's fields. Source spans are left out; hashes of sources are not."""
    left, right = before.model_dump(mode="json"), after.model_dump(mode="json")
    for dump in (left, right):
        for pool in dump["pools"]:  # thousands of ranks say less than how many are on which host
            pool["devices"] = len(pool["ranks"])
            pool["hosts"] = _counted([rank["host"] for rank in pool.pop("ranks")])
    return [change for key in left for change in _compare(key, left[key], right[key])]


def _counted(hosts: list[str]) -> dict[str, int]:
    return {host: hosts.count(host) for host in dict.fromkeys(hosts)}


def _compare(path: str, left: Any, right: Any) -> Iterator[Change]:
    if left == right:
        return
    if isinstance(left, dict) and isinstance(right, dict):
        if left.get("kind") != right.get("kind"):
            yield Change(path, "changed", _plain(left), _plain(right))
            return
        for key in [*left, *(k for k in right if k not in left)]:
            if key in _IGNORED:
                continue
            where = f"{path}.{key}"
            if key not in right:
                yield Change(where, "removed", left[key], None)
            elif key not in left:
                yield Change(where, "added", None, right[key])
            else:
                yield from _compare(where, left[key], right[key])
    elif isinstance(left, list) and isinstance(right, list):
        yield from _lists(path, left, right)
    else:
        yield Change(path, "changed", left, right)


def _lists(path: str, left: list[Any], right: list[Any]) -> Iterator[Change]:
    """Entries matched by name. Lists without names are one value."""
    names = [[_name(item) for item in items] for items in (left, right)]
    if any(None in found or len(set(found)) < len(found) for found in names):
        if _plain(left) != _plain(right):
            yield Change(path, "changed", _plain(left), _plain(right))
        return
    old, new = (dict(zip(found, items, strict=True)) for found, items in zip(names, (left, right), strict=True))
    for name, item in old.items():
        if name not in new:
            yield Change(f"{path}[{name}]", "removed", _plain(item), None)
    for name, item in new.items():
        where = f"{path}[{name}]"
        if name not in old:
            yield Change(where, "added", None, _plain(item))
        else:
            yield from _compare(where, old[name], item)
    kept = [name for name in old if name in new]
    if kept != [name for name in new if name in old]:
        yield Change(path, "moved", kept, [name for name in new if name in old])


def _name(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    return next((str(item[key]) for key in _NAMES if key in item), None)


def _plain(value: Any) -> Any:
    """Without source places."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in _IGNORED}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
