"""Syntax colours: a Pygments lexer, found by its entry point (rich, Sphinx, Jupyter, pygmentize).

Keywords come from the grammar's word table, units and built-in calls from the frontend's tables.
"""

from __future__ import annotations

from typing import ClassVar

from pygments.lexer import RegexLexer, bygroups, words  # type: ignore[import-untyped]
from pygments.token import (  # type: ignore[import-untyped]
    Comment,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Whitespace,
)

from rlflow.frontend import signatures
from rlflow.frontend.units import UNITS
from rlflow.grammar.words import ITEM_WORDS

CONSTANTS = ("true", "false", "none")
_DECLARED = [word for word, terminal in ITEM_WORDS.items() if terminal == "DECLARED"]
DECLARING = (*_DECLARED, "flow", "schedule", "cluster")
"""Keywords that start something with a name of its own."""

KEYWORDS = tuple(word for word in ITEM_WORDS if word not in CONSTANTS and word not in DECLARING)

BUILTINS = tuple(
    sorted(
        {name for table in signatures.DECLARATIONS.values() for name in table}
        | {*signatures.FUNCTIONS, *signatures.LOSSES, *signatures.OPTIMIZERS, *signatures.ON_ERRORS}
        | {*signatures.ADAPTERS}
    )
)

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_UNIT = words([u for u in UNITS if u != "%"], prefix=r"(?!step\s*\{)", suffix=r"(?![\w.(/]|\s*=(?!=))").get()
_INTEGER = r"\d[\d_]*(?!\d|\.\d|[eE][+-]?\d)"
_FLOAT = r"\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?"


class RlflowLexer(RegexLexer):  # type: ignore[misc]
    """Lexer for .rlflow files."""

    name = "rlflow"
    aliases: ClassVar = ["rlflow"]
    filenames: ClassVar = ["*.rlflow"]
    mimetypes: ClassVar = ["text/x-rlflow"]
    url = ""
    version_added = ""

    tokens: ClassVar = {
        "root": [
            (r"\s+", Whitespace),
            (r"#[^\n]*", Comment.Single),
            (r'"', String.Double, "string"),
            (rf"({_INTEGER})([ \t]*)(%|{_UNIT})", bygroups(Number.Integer, Whitespace, Keyword.Type)),
            (rf"({_FLOAT})([ \t]*)(%|{_UNIT})", bygroups(Number.Float, Whitespace, Keyword.Type)),
            (_INTEGER, Number.Integer),
            (_FLOAT, Number.Float),
            (rf"(\.)(\s*)({_NAME})(?=\s*\()", bygroups(Punctuation, Whitespace, Name.Function)),
            (rf"(\.)(\s*)({_NAME})", bygroups(Punctuation, Whitespace, Name.Attribute)),
            # what is given a value may be called like a keyword: an argument, a setting
            (rf"{_NAME}(?=\s*=(?!=))", Name.Variable),
            (words(CONSTANTS, suffix=r"\b"), Keyword.Constant),
            (words(DECLARING, suffix=r"\b"), Keyword.Declaration),
            (words(KEYWORDS, suffix=r"\b"), Keyword),
            (words(BUILTINS, suffix=r"(?=\s*\()"), Name.Builtin),
            (rf"{_NAME}(?=\s*\()", Name.Function),
            (_NAME, Name),
            (r"<=|>=|==|!=|[-+*/=<>]", Operator),
            (r"[(){}\[\],]", Punctuation),
        ],
        "string": [
            (r'\\[nt"\\]', String.Escape),
            (r'[^"\\\n]+', String.Double),
            (r"\\.", String.Double),
            (r'"', String.Double, "#pop"),
            (r"(?=\n)", String.Double, "#pop"),
        ],
    }
