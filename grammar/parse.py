"""Text to syntax tree, and syntax errors to diagnostics."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import name as character_name

from lark import Lark, Token, Transformer, Tree, UnexpectedCharacters, UnexpectedEOF, UnexpectedToken, v_args
from lark.exceptions import UnexpectedInput

from rlflow.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span, did_you_mean
from rlflow.grammar import nodes
from rlflow.grammar.words import ITEM_WORDS, describe_expected, enclosing_block

MAX_DEPTH = 200
"""Levels of a tree; everything that walks one may recurse."""


@cache
def _lark(start: str) -> Lark:
    grammar = Path(__file__).with_name("rlflow.lark").read_text("utf-8")
    return Lark(grammar, parser="lalr", start=start, propagate_positions=True, maybe_placeholders=True)


def parse(source: SourceFile) -> nodes.Program:
    """The tree of a whole file. Raises CompileError with one RLF0xxx diagnostic for text that is not a program."""
    items = _build(source, "start")
    return nodes.Program(source, tuple(items))


def parse_expression(source: SourceFile) -> nodes.Expr:
    """The tree of one expression, as in `--set key=EXPRESSION`. Raises CompileError."""
    result: nodes.Expr = _build(source, "expr")
    return result


def _build(source: SourceFile, start: str) -> Any:
    try:
        tree = _lark(start).parse(source.text)
    except UnexpectedInput as error:
        raise CompileError([_syntax_error(source, error)]) from None
    deep = _too_deep(tree)
    if deep is not None:
        span = Span(source, deep.meta.start_pos, deep.meta.end_pos)
        raise CompileError(
            [
                Diagnostic(
                    "RLF0001", f"this is nested more than {MAX_DEPTH} levels deep", (Label(span, "write less here"),)
                )
            ]
        )
    builder = _Build(source)
    result = builder.transform(tree)
    if builder.problems:
        raise CompileError(builder.problems)
    return result


def _too_deep(tree: Tree[Token]) -> Tree[Token] | None:
    """The first part of the tree below MAX_DEPTH levels, or None. A long sum is as deep as it has terms."""
    stack = [(tree, 1)]
    while stack:
        part, depth = stack.pop()
        if depth > MAX_DEPTH and not part.meta.empty:
            return part
        stack.extend((child, depth + 1) for child in reversed(part.children) if isinstance(child, Tree))
    return None


def _syntax_error(source: SourceFile, error: UnexpectedInput) -> Diagnostic:
    text = source.text
    if isinstance(error, UnexpectedEOF) or (isinstance(error, UnexpectedToken) and error.token.type == "$END"):
        end = len(text.rstrip())
        span = Span(source, end, end)
        expected = describe_expected(error.accepts if isinstance(error, UnexpectedToken) else error.expected)
        block = enclosing_block(text, end)
        notes: tuple[str, ...] = ()
        if block is not None:
            line, _ = source.position(block)
            notes = (f"the `{{` on line {line} is not closed",)
        return Diagnostic("RLF0002", "the file ends in the middle of a statement", (Label(span, expected),), notes)
    if isinstance(error, UnexpectedCharacters):
        at = error.pos_in_stream or 0
        word = text[at]
        span = Span(source, at, at + 1)
        if word == '"':
            line_end = text.find("\n", at)
            span = Span(source, at, len(text) if line_end < 0 else line_end)
            return Diagnostic(
                "RLF0004", "this string has no closing quote on its line", (Label(span, 'add `"` at its end'),)
            )
        return Diagnostic(
            "RLF0003", f"unexpected character {_character(word)}", (Label(span, describe_expected(error.allowed)),)
        )
    assert isinstance(error, UnexpectedToken)
    token = error.token
    at = token.start_pos or 0
    word = str(token)
    span = Span(source, at, at + len(word))
    help_lines: tuple[str, ...] = ()
    accepts = error.accepts or error.expected
    if word in ITEM_WORDS and ("NAME" in accepts or text[at + len(word) :].lstrip().startswith("=")):
        return _reserved(word, span)
    guess = did_you_mean(word, [w for w, terminal in ITEM_WORDS.items() if terminal in accepts])
    if guess and guess != word:
        help_lines = (f"did you mean `{guess}`?",)
    shown = word if len(word) <= 40 else word[:40] + "..."
    return Diagnostic("RLF0001", f"unexpected `{shown}`", (Label(span, describe_expected(accepts)),), help=help_lines)


def _character(char: str) -> str:
    """The character in backticks, or its number and name when it cannot be seen."""
    if char.isprintable() and not char.isspace():
        return f"`{char}`"
    name = character_name(char, "")
    return f"U+{ord(char):04X}" + (f" ({name.lower()})" if name else "")


def _reserved(word: str, span: Span) -> Diagnostic:
    return Diagnostic(
        "RLF0005",
        f"`{word}` is a word of the language and cannot name a value",
        (Label(span, "choose another name"),),
        help=(f"for example `{word}_`",),
    )


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


@v_args(meta=True)
class _Build(Transformer[Token, Any]):
    """Lark tree to nodes. Method names are the grammar's rule names."""

    def __init__(self, source: SourceFile) -> None:
        super().__init__()
        self._source = source
        self.problems: list[Diagnostic] = []

    def _span(self, meta: Any) -> Span:
        if getattr(meta, "empty", True):
            return Span(self._source, 0, 0)
        return Span(self._source, meta.start_pos, meta.end_pos)

    def _token(self, token: Token) -> Span:
        return Span(self._source, token.start_pos or 0, token.end_pos or 0)

    def _ident(self, token: Token) -> nodes.Ident:
        return nodes.Ident(str(token), self._token(token))

    def start(self, meta: Any, items: list[Any]) -> list[Any]:
        return items

    # flow
    def flow(self, meta: Any, c: list[Any]) -> nodes.Flow:
        return nodes.Flow(self._ident(c[0]), c[1] or (), tuple(c[2:]), self._span(meta))

    def params(self, meta: Any, c: list[Any]) -> tuple[nodes.Param, ...]:
        return tuple(p for p in c if p is not None)

    def _free(self, token: Token) -> nodes.Ident:
        """A name that is no word of the language."""
        if str(token) in ITEM_WORDS:
            self.problems.append(_reserved(str(token), self._token(token)))
        return self._ident(token)

    def param(self, meta: Any, c: list[Any]) -> nodes.Param:
        return nodes.Param(self._free(c[0]), c[1], self._span(meta))

    def declaration(self, meta: Any, c: list[Any]) -> nodes.Declaration:
        return nodes.Declaration(str(c[0]), self._free(c[1]), c[2], self._span(meta))

    def block(self, meta: Any, c: list[Any]) -> tuple[nodes.Statement, ...]:
        return tuple(c)

    def step(self, meta: Any, c: list[Any]) -> nodes.Step:
        return nodes.Step(c[0], self._span(meta))

    def evaluate(self, meta: Any, c: list[Any]) -> nodes.Evaluate:
        return nodes.Evaluate(self._free(c[0]), c[1], c[2], self._span(meta))

    def allow(self, meta: Any, c: list[Any]) -> nodes.Allow:
        return nodes.Allow(self._ident(c[0]), c[1], c[2], self._span(meta))

    def stop(self, meta: Any, c: list[Any]) -> nodes.Stop:
        return nodes.Stop(c[0], self._span(meta))

    def save(self, meta: Any, c: list[Any]) -> nodes.Save:
        return nodes.Save(c[0], self._span(meta))

    def seed(self, meta: Any, c: list[Any]) -> nodes.Seed:
        return nodes.Seed(c[0], self._span(meta))

    def assign(self, meta: Any, c: list[Any]) -> nodes.Assign:
        return nodes.Assign(self._free(c[0]), c[1], self._span(meta))

    def call_statement(self, meta: Any, c: list[Any]) -> nodes.CallStatement:
        return nodes.CallStatement(c[0], self._span(meta))

    # schedule
    def schedule(self, meta: Any, c: list[Any]) -> nodes.Schedule:
        cluster = None if c[1] is None else self._ident(c[1])
        return nodes.Schedule(self._ident(c[0]), cluster, tuple(c[2:]), self._span(meta))

    def pool(self, meta: Any, c: list[Any]) -> nodes.Pool:
        return nodes.Pool(self._ident(c[0]), c[1], c[2] or (), self._span(meta))

    def place(self, meta: Any, c: list[Any]) -> nodes.Place:
        stages = tuple(x for x in c if isinstance(x, nodes.StageRef))
        settings = tuple(x for x in c if isinstance(x, nodes.Setting))
        pool = next(x for x in c if isinstance(x, Token))
        return nodes.Place(stages, self._ident(pool), settings, self._span(meta))

    def stage(self, meta: Any, c: list[Any]) -> nodes.StageRef:
        return nodes.StageRef(self._ident(c[0]), None if c[1] is None else self._ident(c[1]), self._span(meta))

    def staleness(self, meta: Any, c: list[Any]) -> nodes.Staleness:
        admit = None if c[2] is None else self._ident(c[2])
        return nodes.Staleness(self._ident(c[0]), c[1], admit, self._span(meta))

    def trigger(self, meta: Any, c: list[Any]) -> nodes.Trigger:
        carry = None if c[2] is None else self._ident(c[2])
        return nodes.Trigger(self._ident(c[0]), c[1], carry, self._span(meta))

    def auto(self, meta: Any, c: list[Any]) -> nodes.Auto:
        return nodes.Auto(self._span(meta))

    # cluster
    def cluster(self, meta: Any, c: list[Any]) -> nodes.Cluster:
        return nodes.Cluster(self._ident(c[0]), tuple(c[1:]), self._span(meta))

    def entry(self, meta: Any, c: list[Any]) -> nodes.Entry:
        return nodes.Entry(self._ident(c[0]), c[1], c[2] or (), self._span(meta))

    def settings_block(self, meta: Any, c: list[Any]) -> tuple[nodes.Setting, ...]:
        return tuple(s for s in c if s is not None)

    def setting(self, meta: Any, c: list[Any]) -> nodes.Setting:
        return nodes.Setting(self._ident(c[0]), c[1], self._span(meta))

    # expressions
    def quantity(self, meta: Any, c: list[Token]) -> nodes.Quantity:
        text = str(c[0])
        split = next(i for i in range(1, len(text) + 1) if _is_unit(text[i:]))
        return nodes.Quantity(_number(text[:split].strip()), text[split:].strip(), self._token(c[0]))

    def number(self, meta: Any, c: list[Token]) -> nodes.Number:
        return nodes.Number(_number(str(c[0])), self._token(c[0]))

    def string(self, meta: Any, c: list[Token]) -> nodes.String:
        return nodes.String(_unescape(str(c[0])[1:-1]), self._token(c[0]))

    def true(self, meta: Any, c: list[Any]) -> nodes.Constant:
        return nodes.Constant(True, self._span(meta))

    def false(self, meta: Any, c: list[Any]) -> nodes.Constant:
        return nodes.Constant(False, self._span(meta))

    def none(self, meta: Any, c: list[Any]) -> nodes.Constant:
        return nodes.Constant(None, self._span(meta))

    def name(self, meta: Any, c: list[Token]) -> nodes.Name:
        return nodes.Name(str(c[0]), self._token(c[0]))

    def list_of(self, meta: Any, c: list[Any]) -> nodes.ListOf:
        return nodes.ListOf(tuple(x for x in c if x is not None), self._span(meta))

    def attribute(self, meta: Any, c: list[Any]) -> nodes.Attribute:
        return nodes.Attribute(c[0], self._ident(c[1]), self._span(meta))

    def argument(self, meta: Any, c: list[Any]) -> nodes.Argument:
        return nodes.Argument(None if c[0] is None else self._ident(c[0]), c[1], self._span(meta))

    def call(self, meta: Any, c: list[Any]) -> nodes.Call:
        return nodes.Call(c[0], tuple(a for a in c[1:] if a is not None), self._span(meta))

    def _binary(self, operator: str, meta: Any, c: list[Any]) -> nodes.Binary:
        return nodes.Binary(operator, c[0], c[1], self._span(meta))

    def add(self, meta: Any, c: list[Any]) -> nodes.Binary:
        return self._binary("+", meta, c)

    def subtract(self, meta: Any, c: list[Any]) -> nodes.Binary:
        return self._binary("-", meta, c)

    def multiply(self, meta: Any, c: list[Any]) -> nodes.Binary:
        return self._binary("*", meta, c)

    def divide(self, meta: Any, c: list[Any]) -> nodes.Binary:
        return self._binary("/", meta, c)

    def negate(self, meta: Any, c: list[Any]) -> nodes.Negate:
        return nodes.Negate(c[0], self._span(meta))


def _is_unit(tail: str) -> bool:
    """Whether the tail of a quantity token is its unit: a word that is not the exponent of the number."""
    tail = tail.strip()
    return tail == "%" or (tail != "" and tail.replace("/", "").isalpha())
