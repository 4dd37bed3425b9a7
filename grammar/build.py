"""The parser's tree to the nodes of the syntax tree."""

from __future__ import annotations

from typing import Any

from rlflow.diagnostics import Diagnostic, Label, SourceFile, Span
from rlflow.grammar import nodes
from rlflow.grammar.errors import reserved
from rlflow.grammar.lalr import Extent
from rlflow.grammar.scanner import Token
from rlflow.grammar.words import ITEM_WORDS

_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


def _unescape(body: str) -> str:
    out: list[str] = []
    chars = iter(body)
    for char in chars:
        if char == "\\":
            follow = next(chars)
            out.append(_ESCAPES.get(follow, "\\" + follow))
        else:
            out.append(char)
    return "".join(out)


def _number(text: str) -> int | float:
    text = text.replace("_", "")
    if any(c in text for c in ".eE") or len(text) > 300:  # beyond every float; the frontend refuses what is not finite
        return float(text)
    return int(text)


class Build:
    """The actions of the parser. Method names are the grammar's rule names; `c` are the children."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self.problems: list[Diagnostic] = []

    def _span(self, extent: Extent) -> Span:
        return Span(self._source, extent[0], extent[1])

    def _token(self, token: Token) -> Span:
        return Span(self._source, token.start, token.end)

    def _ident(self, token: Token) -> nodes.Ident:
        return nodes.Ident(token.text, self._token(token))

    def start(self, extent: Extent, items: list[Any]) -> list[Any]:
        return items

    def import_file(self, extent: Extent, c: list[Token]) -> nodes.Import:
        path = nodes.String(_unescape(c[0].text[1:-1]), self._token(c[0]))
        return nodes.Import(path, self._span(extent))

    # flow
    def flow(self, extent: Extent, c: list[Any]) -> nodes.Flow:
        return nodes.Flow(self._ident(c[0]), c[1] or (), tuple(c[2:]), self._span(extent))

    def params(self, extent: Extent, c: list[Any]) -> tuple[nodes.Param, ...]:
        return tuple(p for p in c if p is not None)

    def _free(self, token: Token) -> nodes.Ident:
        """A name that is no word of the language."""
        if token.text in ITEM_WORDS:
            self.problems.append(reserved(token.text, self._token(token)))
        return self._ident(token)

    def param(self, extent: Extent, c: list[Any]) -> nodes.Param:
        return nodes.Param(self._free(c[0]), c[1], self._span(extent))

    def declaration(self, extent: Extent, c: list[Any]) -> nodes.Declaration:
        return nodes.Declaration(c[0].text, self._free(c[1]), c[2], self._span(extent))

    def block(self, extent: Extent, c: list[Any]) -> tuple[nodes.Statement | nodes.If, ...]:
        return tuple(c)

    def item_block(self, extent: Extent, c: list[Any]) -> tuple[nodes.FlowItem | nodes.If, ...]:
        return tuple(c)

    def if_item(self, extent: Extent, c: list[Any]) -> nodes.If:
        return nodes.If(c[0], c[1], c[2], self._span(extent))

    if_statement = if_item

    def step(self, extent: Extent, c: list[Any]) -> nodes.Step:
        return nodes.Step(c[0], self._span(extent))

    def evaluate(self, extent: Extent, c: list[Any]) -> nodes.Evaluate:
        return nodes.Evaluate(self._free(c[0]), c[1], c[2], self._span(extent))

    def allow(self, extent: Extent, c: list[Any]) -> nodes.Allow:
        return nodes.Allow(self._ident(c[0]), c[1], c[2], self._span(extent))

    def stop(self, extent: Extent, c: list[Any]) -> nodes.Stop:
        return nodes.Stop(c[0], self._span(extent))

    def save(self, extent: Extent, c: list[Any]) -> nodes.Save:
        return nodes.Save(c[0], self._span(extent))

    def seed(self, extent: Extent, c: list[Any]) -> nodes.Seed:
        return nodes.Seed(c[0], self._span(extent))

    def assign(self, extent: Extent, c: list[Any]) -> nodes.Assign:
        return nodes.Assign(self._free(c[0]), c[1], self._span(extent))

    def call_statement(self, extent: Extent, c: list[Any]) -> nodes.CallStatement:
        base = c[0]
        while isinstance(base, nodes.Call | nodes.Attribute):
            base = base.function if isinstance(base, nodes.Call) else base.base
        if not isinstance(base, nodes.Name):
            label = Label(base.span, "expected a name")
            self.problems.append(Diagnostic("RLF0001", "a statement starts with a name", (label,)))
        return nodes.CallStatement(c[0], self._span(extent))

    # schedule
    def schedule(self, extent: Extent, c: list[Any]) -> nodes.Schedule:
        cluster = None if c[1] is None else self._ident(c[1])
        return nodes.Schedule(self._ident(c[0]), cluster, tuple(c[2:]), self._span(extent))

    def pool(self, extent: Extent, c: list[Any]) -> nodes.Pool:
        return nodes.Pool(self._ident(c[0]), c[1], c[2] or (), self._span(extent))

    def place(self, extent: Extent, c: list[Any]) -> nodes.Place:
        stages = tuple(x for x in c if isinstance(x, nodes.StageRef))
        settings = tuple(x for x in c if isinstance(x, nodes.Setting))
        pools = tuple(self._ident(x) for x in c if isinstance(x, Token))
        return nodes.Place(stages, pools, settings, self._span(extent))

    def stage(self, extent: Extent, c: list[Any]) -> nodes.StageRef:
        return nodes.StageRef(self._ident(c[0]), None if c[1] is None else self._ident(c[1]), self._span(extent))

    def staleness(self, extent: Extent, c: list[Any]) -> nodes.Staleness:
        admit = None if c[2] is None else self._ident(c[2])
        return nodes.Staleness(self._ident(c[0]), c[1], admit, tuple(c[3:]), self._span(extent))

    def trigger(self, extent: Extent, c: list[Any]) -> nodes.Trigger:
        carry = None if c[2] is None else self._ident(c[2])
        return nodes.Trigger(self._ident(c[0]), c[1], carry, self._span(extent))

    def auto(self, extent: Extent, c: list[Any]) -> nodes.Auto:
        return nodes.Auto(self._span(extent))

    # cluster
    def cluster(self, extent: Extent, c: list[Any]) -> nodes.Cluster:
        return nodes.Cluster(self._ident(c[0]), tuple(c[1:]), self._span(extent))

    def entry(self, extent: Extent, c: list[Any]) -> nodes.Entry:
        return nodes.Entry(self._ident(c[0]), c[1], c[2] or (), self._span(extent))

    def settings_block(self, extent: Extent, c: list[Any]) -> tuple[nodes.Setting, ...]:
        return tuple(s for s in c if s is not None)

    def setting(self, extent: Extent, c: list[Any]) -> nodes.Setting:
        return nodes.Setting(self._ident(c[0]), c[1], self._span(extent))

    # expressions
    def quantity(self, extent: Extent, c: list[Token]) -> nodes.Quantity:
        text = c[0].text
        split = next(i for i in range(1, len(text) + 1) if _is_unit(text[i:]))
        return nodes.Quantity(_number(text[:split].strip()), text[split:].strip(), self._token(c[0]))

    def number(self, extent: Extent, c: list[Token]) -> nodes.Number:
        return nodes.Number(_number(c[0].text), self._token(c[0]))

    def string(self, extent: Extent, c: list[Token]) -> nodes.String:
        return nodes.String(_unescape(c[0].text[1:-1]), self._token(c[0]))

    def true(self, extent: Extent, c: list[Any]) -> nodes.Constant:
        return nodes.Constant(True, self._span(extent))

    def false(self, extent: Extent, c: list[Any]) -> nodes.Constant:
        return nodes.Constant(False, self._span(extent))

    def none(self, extent: Extent, c: list[Any]) -> nodes.Constant:
        return nodes.Constant(None, self._span(extent))

    def name(self, extent: Extent, c: list[Token]) -> nodes.Name:
        return nodes.Name(c[0].text, self._token(c[0]))

    def list_of(self, extent: Extent, c: list[Any]) -> nodes.ListOf:
        return nodes.ListOf(tuple(x for x in c if x is not None), self._span(extent))

    def attribute(self, extent: Extent, c: list[Any]) -> nodes.Attribute:
        return nodes.Attribute(c[0], self._ident(c[1]), self._span(extent))

    def argument(self, extent: Extent, c: list[Any]) -> nodes.Argument:
        return nodes.Argument(None if c[0] is None else self._ident(c[0]), c[1], self._span(extent))

    def call(self, extent: Extent, c: list[Any]) -> nodes.Call:
        return nodes.Call(c[0], tuple(a for a in c[1:] if a is not None), self._span(extent))

    def _binary(self, operator: str, extent: Extent, c: list[Any]) -> nodes.Binary:
        return nodes.Binary(operator, c[0], c[1], self._span(extent))

    def add(self, extent: Extent, c: list[Any]) -> nodes.Binary:
        return self._binary("+", extent, c)

    def subtract(self, extent: Extent, c: list[Any]) -> nodes.Binary:
        return self._binary("-", extent, c)

    def multiply(self, extent: Extent, c: list[Any]) -> nodes.Binary:
        return self._binary("*", extent, c)

    def divide(self, extent: Extent, c: list[Any]) -> nodes.Binary:
        return self._binary("/", extent, c)

    def compare(self, extent: Extent, c: list[Any]) -> nodes.Compare:
        return nodes.Compare(c[1].text, c[0], c[2], self._span(extent))

    def both(self, extent: Extent, c: list[Any]) -> nodes.Logic:
        return nodes.Logic("and", c[0], c[1], self._span(extent))

    def either(self, extent: Extent, c: list[Any]) -> nodes.Logic:
        return nodes.Logic("or", c[0], c[1], self._span(extent))

    def invert(self, extent: Extent, c: list[Any]) -> nodes.Not:
        return nodes.Not(c[0], self._span(extent))

    def conditional(self, extent: Extent, c: list[Any]) -> nodes.Conditional:
        return nodes.Conditional(c[0], c[1], c[2], self._span(extent))

    def negate(self, extent: Extent, c: list[Any]) -> nodes.Negate:
        return nodes.Negate(c[0], self._span(extent))


def _is_unit(tail: str) -> bool:
    """Whether the tail of a quantity token is its unit: a word that is not the exponent of the number."""
    tail = tail.strip()
    return tail == "%" or (tail != "" and tail.replace("/", "").isalpha())
