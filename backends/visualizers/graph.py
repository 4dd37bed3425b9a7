"""The dataflow graph of a plan, or of a flow on its way to one, as dot, Mermaid, SVG, PNG or PDF."""

from __future__ import annotations

import re
import shutil
from typing import Literal

from rlflow.backends.visualizers.dot import to_dot
from rlflow.backends.visualizers.graph_flow import flow_picture
from rlflow.backends.visualizers.graph_model import build_picture
from rlflow.backends.visualizers.graph_parts import Picture
from rlflow.backends.visualizers.mermaid import to_mermaid
from rlflow.ir.flow import Flow
from rlflow.plan import Plan

GraphFormat = Literal["dot", "mmd", "svg"]
ImageFormat = Literal["png", "pdf"]
SvgEngine = Literal["dot", "built-in"]

IMAGE_DPI = 110
"""Of a PNG: text of 10 points is readable without zooming."""


class NoDot(Exception):
    """Graphviz' `dot` is needed and cannot be used; the message says why."""


def picture_of(drawn: Plan | Flow) -> Picture:
    """What is drawn of a plan, or of a flow of any stage."""
    return build_picture(drawn) if isinstance(drawn, Plan) else flow_picture(drawn)


def render_graph(drawn: Plan | Flow, format: GraphFormat) -> str:
    """The graph as text, equal for equal plans.

    SVG is laid out by Graphviz where its `dot` command works, else by rlflow itself; `render_svg` also says by which.
    """
    if format == "dot":
        return to_dot(picture_of(drawn))
    if format == "mmd":
        return to_mermaid(picture_of(drawn))
    return render_svg(drawn)[0]


def render_svg(drawn: Plan | Flow, engine: SvgEngine | None = None) -> tuple[str, SvgEngine]:
    """The graph as SVG and who laid it out. `engine` forces one; NoDot when `dot` is forced and not usable."""
    picture = picture_of(drawn)
    if engine != "built-in":
        try:
            svg = _clean(_dot(picture, "svg").decode())
        except NoDot:
            if engine == "dot":
                raise
        else:
            return _describe(svg, "Laid out by Graphviz dot."), "dot"
    from rlflow.backends.visualizers.svg_fallback import to_svg

    return _describe(to_svg(picture), "Laid out by rlflow, without Graphviz."), "built-in"


def render_image(drawn: Plan | Flow, format: ImageFormat) -> bytes:
    """The graph as PNG or PDF, which only Graphviz draws. Raises NoDot."""
    return _dot(picture_of(drawn), format)


def _dot(picture: Picture, format: str) -> bytes:
    """dot's drawing. Raises NoDot."""
    if shutil.which("dot") is None:
        raise NoDot("the command `dot` of Graphviz is not on the path")
    import graphviz

    text = to_dot(picture)
    if format == "png":
        text = text.replace("  graph [", f'  graph [dpi="{IMAGE_DPI}", ', 1)
    try:
        drawn: bytes = graphviz.pipe("dot", format, text.encode(), quiet=True)
    except graphviz.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise NoDot(f"the command `dot` of Graphviz failed: {said[0] if said else error}") from None
    except (graphviz.ExecutableNotFound, OSError) as error:
        raise NoDot(f"the command `dot` of Graphviz does not run: {error}") from None
    return drawn


def _clean(svg: str) -> str:
    """dot's SVG without XML head and comments, which name the Graphviz version."""
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    return svg[svg.index("<svg") :]


def _describe(svg: str, note: str) -> str:
    """The same SVG with `note` as its description."""
    head_end = svg.index(">") + 1
    return f"{svg[:head_end]}<desc>{note}</desc>{svg[head_end:]}"
