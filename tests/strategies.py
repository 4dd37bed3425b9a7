"""Hypothesis strategies for syntax trees of valid programs. Load it by path: test folders are no packages.

Every tree can be written and parses back: names are no keywords where keywords are reserved, a call that stands alone
starts with a name (one that starts with `(` would continue the statement before it), numbers are not negative.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rlflow.diagnostics import SourceFile, Span
from rlflow.frontend.units import UNITS
from rlflow.grammar import nodes
from rlflow.grammar.words import ITEM_WORDS

FILE = SourceFile("made.rlflow", "")
SPAN = Span(FILE, 0, 0)

FREE_KEYWORDS = ("data", "model", "seed", "step", "on", "pool", "auto", "with", "every", "if", "else", "import")
"""Words that are reserved as names of values but free as names of arguments and settings."""

_words = st.text("abcdezEZ_019", min_size=1, max_size=10).filter(lambda word: not word[0].isdigit())
names = _words.filter(lambda word: word not in ITEM_WORDS)
idents = names.map(lambda word: nodes.Ident(word, SPAN))
argument_idents = (names | st.sampled_from(FREE_KEYWORDS)).map(lambda word: nodes.Ident(word, SPAN))

values = st.integers(0, 10**12) | st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)
numbers = values.map(lambda value: nodes.Number(value, SPAN))
units = st.sampled_from([*UNITS, "things", "x/y"])
quantities = st.builds(nodes.Quantity, values, units, st.just(SPAN))
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.text('\\"#\n\tnt{}(), é')
strings = texts.map(lambda value: nodes.String(value, SPAN))
constants = st.sampled_from([True, False, None]).map(lambda value: nodes.Constant(value, SPAN))
name_exprs = names.map(lambda word: nodes.Name(word, SPAN))


def _several(item: st.SearchStrategy[nodes.Expr]) -> st.SearchStrategy[tuple[nodes.Expr, ...]]:
    return st.lists(item, max_size=4).map(tuple)


def _arguments(inner: st.SearchStrategy[nodes.Expr]) -> st.SearchStrategy[tuple[nodes.Argument, ...]]:
    one = st.builds(nodes.Argument, st.none() | argument_idents, inner, st.just(SPAN))
    return st.lists(one, max_size=5).map(tuple)


def _larger(inner: st.SearchStrategy[nodes.Expr]) -> st.SearchStrategy[nodes.Expr]:
    return st.one_of(
        st.builds(nodes.ListOf, _several(inner), st.just(SPAN)),
        st.builds(nodes.Attribute, inner, argument_idents, st.just(SPAN)),
        st.builds(nodes.Call, inner, _arguments(inner), st.just(SPAN)),
        st.builds(nodes.Binary, st.sampled_from("+-*/"), inner, inner, st.just(SPAN)),
        st.builds(nodes.Negate, inner, st.just(SPAN)),
        st.builds(nodes.Compare, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), inner, inner, st.just(SPAN)),
        st.builds(nodes.Logic, st.sampled_from(["and", "or"]), inner, inner, st.just(SPAN)),
        st.builds(nodes.Not, inner, st.just(SPAN)),
        st.builds(nodes.Conditional, inner, inner, inner, st.just(SPAN)),
    )


leaves: st.SearchStrategy[nodes.Expr] = st.one_of(numbers, quantities, strings, constants, name_exprs)
expressions: st.SearchStrategy[nodes.Expr] = st.recursive(leaves, _larger, max_leaves=10)


@st.composite
def call_chains(draw: st.DrawFn) -> nodes.Expr:
    """`a`, `a.b(...)`, `a(...).b` and so on."""
    chain: nodes.Expr = draw(name_exprs)
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            chain = nodes.Call(chain, draw(_arguments(expressions)), SPAN)
        else:
            chain = nodes.Attribute(chain, draw(argument_idents), SPAN)
    return chain


assigns = st.builds(nodes.Assign, idents, expressions, st.just(SPAN))
call_statements = st.builds(nodes.CallStatement, call_chains(), st.just(SPAN))


def _ifs(item: st.SearchStrategy[Any]) -> st.SearchStrategy[nodes.If]:
    """`if` blocks of items, with and without `else`, and chains of `else if`."""
    block = st.lists(item, max_size=2).map(tuple)
    last = st.builds(nodes.If, expressions, block, st.none() | block, st.just(SPAN))
    return last | st.builds(nodes.If, expressions, block, last, st.just(SPAN))


plain_statements = assigns | call_statements
statements = plain_statements | _ifs(plain_statements) | _ifs(plain_statements | _ifs(plain_statements))
bodies = st.lists(statements, max_size=5).map(tuple)

seed_values: st.SearchStrategy[nodes.Expr] = st.one_of(
    numbers, name_exprs, st.builds(nodes.Negate, numbers | name_exprs, st.just(SPAN))
)
declarations = st.builds(
    nodes.Declaration, st.sampled_from(["data", "model", "reward", "environment"]), idents, expressions, st.just(SPAN)
)
plain_items: st.SearchStrategy[nodes.FlowItem] = st.one_of(
    declarations,
    st.builds(nodes.Step, bodies, st.just(SPAN)),
    st.builds(nodes.Evaluate, idents, st.none() | expressions, bodies, st.just(SPAN)),
    st.builds(nodes.Allow, idents, expressions, st.none() | expressions, st.just(SPAN)),
    st.builds(nodes.Stop, expressions, st.just(SPAN)),
    st.builds(nodes.Save, expressions, st.just(SPAN)),
    st.builds(nodes.Seed, seed_values, st.just(SPAN)),
)
flow_items = plain_items | _ifs(plain_items)
params = st.lists(st.builds(nodes.Param, idents, st.none() | expressions, st.just(SPAN)), max_size=3).map(tuple)
flows = st.builds(nodes.Flow, idents, params, st.lists(flow_items, max_size=6).map(tuple), st.just(SPAN))

settings = st.lists(st.builds(nodes.Setting, argument_idents, expressions, st.just(SPAN)), max_size=4).map(tuple)
stages = st.lists(
    st.builds(nodes.StageRef, idents, st.none() | argument_idents, st.just(SPAN)), min_size=1, max_size=4
).map(tuple)
schedule_items: st.SearchStrategy[nodes.ScheduleItem] = st.one_of(
    st.builds(nodes.Pool, idents, expressions, settings, st.just(SPAN)),
    st.builds(nodes.Place, stages, st.lists(idents, min_size=1, max_size=3).map(tuple), settings, st.just(SPAN)),
    st.builds(nodes.Staleness, idents, expressions, st.none() | idents, settings, st.just(SPAN)),
    st.builds(nodes.Trigger, idents, expressions, st.none() | idents, st.just(SPAN)),
    st.just(nodes.Auto(SPAN)),
)
schedules = st.builds(
    nodes.Schedule, idents, st.none() | idents, st.lists(schedule_items, max_size=6).map(tuple), st.just(SPAN)
)
entries = st.builds(nodes.Entry, idents, expressions, settings, st.just(SPAN))
clusters = st.builds(nodes.Cluster, idents, st.lists(entries, max_size=4).map(tuple), st.just(SPAN))

imports = st.lists(st.builds(nodes.Import, strings, st.just(SPAN)), max_size=2)
programs = st.tuples(imports, st.lists(flows | schedules | clusters, max_size=3)).map(
    lambda parts: nodes.Program(FILE, (*parts[0], *parts[1]))
)
