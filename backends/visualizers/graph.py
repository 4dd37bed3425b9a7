"""The dataflow graph of a plan as dot, Mermaid or SVG text."""

from __future__ import annotations

import re
import shutil
from typing import Literal

from rlflow.backends.visualizers.dot import to_dot
from rlflow.backends.visualizers.graph_model import Picture, build_picture
from rlflow.backends.visualizers.mermaid import to_mermaid
from rlflow.plan import Plan

GraphFormat = Literal["dot", "mmd", "svg"]
SvgEngine = Literal["dot", "built-in"]


def render_graph(plan: Plan, format: GraphFormat) -> str:
    """The graph as text, equal for equal plans.

    SVG is laid out by Graphviz where its `dot` command works, else by rlflow itself; `render_svg` also says by which.
    """
    if format == "dot":
        return to_dot(build_picture(plan))
    if format == "mmd":
        return to_mermaid(build_picture(plan))
    return render_svg(plan)[0]


def render_svg(plan: Plan, engine: SvgEngine | None = None) -> tuple[str, SvgEngine]:
    """The graph as SVG and who laid it out. `engine` forces one; RuntimeError when `dot` is forced and not usable."""
    picture = build_picture(plan)
    if engine != "built-in":
        drawn = _dot_svg(picture)
        if drawn is not None:
            return drawn, "dot"
        if engine == "dot":
            raise RuntimeError("the command `dot` of Graphviz is missing or failed")
    from rlflow.backends.visualizers.svg_fallback import to_svg

    return _describe(to_svg(picture), "Laid out by rlflow, without Graphviz."), "built-in"


def _dot_svg(picture: Picture) -> str | None:
    """dot's drawing, or None where dot cannot be used."""
    if shutil.which("dot") is None:
        return None
    import graphviz

    try:
        raw = graphviz.pipe("dot", "svg", to_dot(picture).encode(), quiet=True).decode()
    except (graphviz.ExecutableNotFound, graphviz.CalledProcessError, OSError):
        return None
    return _describe(_clean(raw), "Laid out by Graphviz dot.")


def _clean(svg: str) -> str:
    """dot's SVG without XML head and comments, which name the Graphviz version."""
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    return svg[svg.index("<svg") :]


def _describe(svg: str, note: str) -> str:
    """The same SVG with `note` as its description."""
    head_end = svg.index(">") + 1
    return f"{svg[:head_end]}<desc>{note}</desc>{svg[head_end:]}"
