"""What notebooks ask values for: `_repr_mimebundle_`, without needing IPython."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar

DRAWN_BY: Mapping[str, tuple[str, str]] = {
    "Checked": ("rlflow.backends.visualizers.notebook", "program_bundle"),
    "Plan": ("rlflow.backends.visualizers.notebook", "plan_bundle"),
    "Schedule": ("rlflow.backends.visualizers.notebook", "schedule_bundle"),
    "Run": ("rlflow.backends.visualizers.notebook", "run_bundle"),
}
"""Class to what draws it. By name, since values lie below what draws them; loaded when a notebook asks."""


class Shown:
    """A value that a notebook draws."""

    drawn_by: ClassVar[Mapping[str, tuple[str, str]]] = DRAWN_BY

    def _repr_mimebundle_(self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None) -> Any:
        """MIME type to text: `text/plain`, and `text/html` where there is a picture. Never raises: a value that cannot
        be drawn says so in one line."""
        name = type(self).__name__
        try:
            module, function = self.drawn_by[name]
            bundle = getattr(import_module(module), function)(self)
        except Exception as error:  # a display must not hide the value behind a traceback
            bundle = {"text/plain": f"<{name} that cannot be shown: {type(error).__name__}: {error}>"}
        wanted = set(include) if include else set(bundle)
        return {kind: text for kind, text in bundle.items() if kind in wanted and kind not in set(exclude or ())}
