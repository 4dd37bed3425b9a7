"""Mutations of programs: of their bytes, of their words, and of their trees."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, get_args

from rlflow.diagnostics import CompileError, SourceFile, Span
from rlflow.grammar import nodes
from rlflow.grammar.format import shape
from rlflow.grammar.parse import parse
from rlflow.grammar.printer import print_tree
from rlflow.grammar.words import ITEM_WORDS

TOKEN = re.compile(r'"[^"\n]*"|[\d.]+(?:e-?\d+)?(?: ?(?:%|[A-Za-z]+(?:/[A-Za-z]+)?\b))?|[A-Za-z_]\w*|[<>=!]=|[^\s]')
ODD_BYTES = (
    b"\xff", b"\x00", b"\xc3\xa9", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\x0b", b"\x0c", b"\x85", b"\t",
    b'"', b"\\", b"#", b"{", b"}", b"(", b")", b"[", b"%", b"=", b"..", b"(" * 300, b"[" * 300, b"-" * 300, b"not " * 300,
    b"# rlflow: ignore[RLF1013]\n", b"# rlflow: ignore[RLF9999]\n", b"\xf0\x9f\x92\xa5", b"9" * 500, b"1e999", b"1_0",
)  # fmt: skip
ODD_WORDS = (
    "0", "-1", "1.5", "1e400", "9" * 400, "1e-320", "1e300", "3 prompts", "3 samples", "2 tokens", "1 step", "5 s", "0 s", "75%",
    "2 GiB", "7 things", '""', '"x"', '"\\u0000"', '"a.jsonl"', '"/"', "true", "none", "[]", "[1, [2]]", "(1 - 1)", "1 / 0", "group", "actor",
    "reference", "exact", "questions", "samples", "batch", "score", "adv", "ref", "v", "reward_", "kl()", "kl(k1)", "entropy()",
    "dpo()", "nll()", "value_clip()", "gspo()", "distill()", "retry(3, then = drop)", "drop", "adamw(1)", "exact(samples)",
    "actor.generate(batch, max_new = 1 token)", "group_normalize(score)", "rloo(score)", "gae(score, v)", "samples.logprobs",
    "best_of(samples, score)", "best_worst(samples, score)", "mixed_groups(samples, score)", "overlong(samples, buffer = 1 token)",
    "frozen(actor)", "value(actor)", 'preset("qwen3_8b")', "local", "cpu", "ascend_910b", "host", "not", "and true", "1 if true else 2",
    "if true {", "} else {", "else if 1 > 0 {", 'import "x.rlflow"', 'import "ppo.rlflow"', 'import "rlflow:clusters"',
    "step {", "flow g {", "schedule ppo on local { auto }", "pool p = 2 devices", "environment e = python(\"environments:Calculator\")",
    "turns = 3, environment = e", "stop after 1 epoch", "save every 1 step", "seed 5", "allow actor staleness <= 2 steps",
)  # fmt: skip
OVERRIDES = (
    "group=4", "group=none", "samples.n=2", "samples.max_new=4", "batch.count=8", "batch=3", "actor=frozen(reference)",
    "actor.layers=1", "actor.context=2", "actor.train.minibatch=16", "train.epochs=2", "stop=3", "stop.after=3", "seed=-1",
    "save=5", "questions.shuffle=false", "first.of=x", "mode=if", "score.x=1", "samples.temperature=0", "=", "a.b.c.d=1",
    "samples.=2", "kl=1e400", 'alphabet="', "actor.train.loss=kl(k1)", "adv.std=false", "adv=rloo(score)", "reference.of=actor",
)  # fmt: skip


# --- bytes -----------------------------------------------------------------------------------------------------------


def mutate_bytes(raw: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(raw) + 1)
        end = min(len(raw), at + chance.choice((1, 1, 3, 20, 200)))
        match chance.randrange(7):
            case 0:
                raw = raw[:at] + raw[end:]
            case 1:
                raw = raw[:at] + raw[at:end] * 2 + raw[end:]
            case 2:
                raw = raw[:at]
            case 3:
                raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
            case 4:
                raw = raw[:at] + bytes([chance.randrange(32, 127)]) + raw[at:]
            case 5:
                raw = raw[:at] + raw[end:] + raw[at:end]
            case _:
                raw = raw[:at] + chance.choice(ODD_BYTES) + raw[at:]
    return raw


# --- words and lines -------------------------------------------------------------------------------------------------


def mutate_words(text: str, others: Sequence[str], chance: random.Random) -> str:
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        tokens = list(TOKEN.finditer(text))
        if not tokens:
            return text
        one, two = sorted((chance.choice(tokens), chance.choice(tokens)), key=lambda token: token.start())
        match chance.randrange(6):
            case 0:
                text = text[: one.start()] + text[one.end() :]
            case 1 | 2:
                text = f"{text[: one.start()]}{chance.choice(ODD_WORDS)} {text[one.end() :]}"
            case 3:
                word = chance.choice(TOKEN.findall(chance.choice(others)) or [""])
                text = f"{text[: one.start()]}{word} {text[one.end() :]}"
            case 4 if one.end() <= two.start():
                between = text[one.end() : two.start()]
                text = text[: one.start()] + two[0] + between + one[0] + text[two.end() :]
            case _:
                text = _mutate_lines(text, others, chance)
    return text


def _mutate_lines(text: str, others: Sequence[str], chance: random.Random) -> str:
    lines = text.split("\n")
    line = lines.pop(chance.randrange(len(lines)))
    if chance.random() < 0.4:
        line = chance.choice(chance.choice(others).split("\n"))
    for _ in range(chance.choice((0, 1, 2))):
        lines.insert(chance.randrange(len(lines) + 1), line)
    return "\n".join(lines)


# --- trees -----------------------------------------------------------------------------------------------------------

_EXPRS = get_args(nodes.Expr)
_FREE = (nodes.Argument, nodes.Setting, nodes.Attribute, nodes.StageRef)
"""Whose names may be words of the language."""
Place = tuple[tuple[str, int], ...]
"""From the root of a tree: the field of each node on the way, and the place in it (-1: the field holds one node)."""
Kept = dict[type, list[Any]]


def places(node: Any, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every node of a tree with the way to it."""
    yield at, node
    for part in fields(node):
        value = getattr(node, part.name)
        if isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from places(item, (*at, (part.name, index)))
        elif is_dataclass(value) and not isinstance(value, Span | SourceFile):
            yield from places(value, (*at, (part.name, -1)))


def edit(node: Any, at: Place, change: Callable[[Any], Any]) -> Any:
    """The tree with the node at a place changed."""
    if not at:
        return change(node)
    (name, index), rest = at[0], at[1:]
    value = getattr(node, name)
    if index < 0:
        return replace(node, **{name: edit(value, rest, change)})
    return replace(node, **{name: (*value[:index], edit(value[index], rest, change), *value[index + 1 :])})


def stock(programs: Sequence[nodes.Program]) -> Kept:
    """All nodes of these programs by their class, to put into others."""
    kept: Kept = {}
    for program in programs:
        for _, node in places(program):
            kept.setdefault(type(node), []).append(node)
    return kept


def mutate_tree(tree: nodes.Program, kept: Kept, chance: random.Random) -> nodes.Program:
    """Another program of the language: nodes replaced by nodes of the same place in the grammar."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        found = [(at, node) for at, node in places(tree) if at]
        if not found:
            return tree
        at, node = chance.choice(found)
        new = edit(tree, at[:-1], partial(_changed, slot=at[-1], node=node, kept=kept, chance=chance))
        tree = new if starts_with_names(new) else tree
    return tree


def starts_with_names(tree: nodes.Program) -> bool:
    """Whether every call that stands alone starts with a name: `(a + b).f()` would continue the statement before it."""
    for _, node in places(tree):
        if isinstance(node, nodes.CallStatement):
            value = node.value
            while isinstance(value, nodes.Call | nodes.Attribute):
                value = value.function if isinstance(value, nodes.Call) else value.base
            if not isinstance(value, nodes.Name):
                return False
    return True


def _changed(parent: Any, *, slot: tuple[str, int], node: Any, kept: Kept, chance: random.Random) -> Any:
    name, index = slot
    if index >= 0 and chance.random() < 0.5:
        items = list(getattr(parent, name))
        match chance.randrange(4):
            case 0 if not isinstance(parent, nodes.Place) or len(items) > 1 or name not in ("stages", "pools"):
                del items[index]
            case 1:
                items.insert(chance.randrange(len(items) + 1), node)
            case 2:
                chance.shuffle(items)
            case _:
                items.insert(index, chance.choice(_fitting(node, kept)))
        if isinstance(parent, nodes.Program):  # imports stand first
            items.sort(key=lambda item: not isinstance(item, nodes.Import))
        return replace(parent, **{name: tuple(items)})
    new = _replacement(parent, name, node, kept, chance)
    if index < 0:
        return replace(parent, **{name: new})
    value = getattr(parent, name)
    return replace(parent, **{name: (*value[:index], new, *value[index + 1 :])})


def _fitting(node: Any, kept: Kept) -> list[Any]:
    """Nodes that may stand beside this one. Blocks of statements and of items are not told apart, so none of those."""
    return [node] if isinstance(node, nodes.If) else kept.get(type(node), [node])


def _replacement(parent: Any, name: str, node: Any, kept: Kept, chance: random.Random) -> Any:
    if isinstance(node, nodes.Ident):
        words = [ident.text for ident in kept[nodes.Ident]] + ["f", "x", "actor", "step", "data"]
        word = chance.choice(words)
        if word in ITEM_WORDS and not isinstance(parent, _FREE):
            word = "x"
        return (
            node
            if isinstance(parent, nodes.StageRef) and name == "owner" and word in ITEM_WORDS
            else replace(node, text=word)
        )
    if isinstance(parent, nodes.Seed):
        return chance.choice([nodes.Number(chance.choice((0, 5, 2**70)), node.span), nodes.Name("group", node.span)])
    if isinstance(parent, nodes.CallStatement) or (isinstance(parent, nodes.Import) and name == "path"):
        return chance.choice(kept.get(type(parent), [parent])).__getattribute__(name)
    if isinstance(node, nodes.Number | nodes.Quantity) and chance.random() < 0.5:
        return replace(node, value=chance.choice((0, 1, 2, 3, 7, 64, 1.5, 1e-9, 1e250, 10**30)))
    if isinstance(node, _EXPRS):
        if chance.random() < 0.2:
            return chance.choice((nodes.Negate(node, node.span), nodes.Binary("*", node, node, node.span)))
        kind = chance.choice([kind for kind in _EXPRS if kept.get(kind)])
        return chance.choice(kept[kind])
    return chance.choice(_fitting(node, kept))


class Unwritable(Exception):
    """A tree whose text is not it: what is wrong, and the text."""


def written(tree: nodes.Program) -> str:
    """The text of a tree. Unwritable when it does not parse back to the same tree."""
    text = print_tree(tree)
    try:
        again = parse(SourceFile("x", text))
    except CompileError as error:
        if "nested more than" in error.diagnostics[0].message:
            return text
        raise Unwritable(f"printed text does not parse: {error.diagnostics[0].message}", text) from None
    if shape(again) != shape(tree):
        raise Unwritable("printed text is another tree", text)
    return text
