"""Texts that are no program: what the parser found, in the user's words."""

from __future__ import annotations

from unicodedata import name as character_name

from rlflow.diagnostics import Diagnostic, Label, SourceFile, Span, did_you_mean
from rlflow.grammar.lalr import UnexpectedCharacterError, UnexpectedTokenError
from rlflow.grammar.scanner import END
from rlflow.grammar.words import ITEM_WORDS, describe_expected, enclosing_block


def syntax_error(source: SourceFile, error: UnexpectedTokenError | UnexpectedCharacterError) -> Diagnostic:
    text = source.text
    if isinstance(error, UnexpectedCharacterError):
        at = error.at
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
    token, accepts = error.token, error.accepts
    if token.kind == END:
        end = len(text.rstrip())
        span = Span(source, end, end)
        block = enclosing_block(text, end)
        notes: tuple[str, ...] = ()
        if block is not None:
            line, _ = source.position(block)
            notes = (f"the `{{` on line {line} is not closed",)
        label = Label(span, describe_expected(accepts))
        return Diagnostic("RLF0002", "the file ends in the middle of a statement", (label,), notes)
    word = token.text.lstrip()
    at = token.end - len(word)
    span = Span(source, at, at + len(word))
    help_lines: tuple[str, ...] = ()
    if word in ITEM_WORDS and ("NAME" in accepts or text[at + len(word) :].lstrip().startswith("=")):
        return reserved(word, span)
    if word == "=" and "COMPARE" in accepts:
        help_lines = ("`==` compares two values",)
    if word == "if" and "_INLINE_IF" in accepts:
        help_lines = ("the `if` of `a if c else b` stands on the line of `a`",)
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


def reserved(word: str, span: Span) -> Diagnostic:
    return Diagnostic(
        "RLF0005",
        f"`{word}` is a word of the language and cannot name a value",
        (Label(span, "choose another name"),),
        help=(f"for example `{word}_`",),
    )
