"""Values put into shell and YAML so that they stay values. Every template quotes with these and nothing else."""

from __future__ import annotations

import json
import re
import shlex

_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


def shell(value: object) -> str:
    """One word of a POSIX shell."""
    return shlex.quote(str(value))


def yaml(value: object) -> str:
    """A YAML 1.1 scalar of the same type: text is always in double quotes."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub(lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))
    assert value is None or isinstance(value, bool | int | float)
    return json.dumps(value)


def comment(value: object) -> str:
    """Text that cannot leave the line, for behind a `#`."""
    return "".join(c if c.isprintable() else " " for c in str(value))


def markdown(value: object) -> str:
    """Code in a line of Markdown, also in a table."""
    return "`" + comment(value).replace("`", "'").replace("|", "/") + "`"
