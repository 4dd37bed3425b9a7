"""The one table of diagnostic codes. A code never changes its meaning; each has a page in docs/errors."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CODES: Final[dict[str, str]] = {
    # 0xxx syntax
    "RLF0001": "unexpected-text",
    "RLF0002": "unexpected-end",
    "RLF0003": "unexpected-character",
    "RLF0004": "unterminated-string",
    "RLF0005": "reserved-word",
    "RLF0006": "unused-suppression",
    "RLF0007": "wrong-suppression",
    "RLF0008": "import-cycle",
    # 1xxx names and types
    "RLF1001": "unknown-name",
    "RLF1002": "defined-twice",
    "RLF1003": "unknown-keyword",
    "RLF1004": "missing-argument",
    "RLF1005": "wrong-unit",
    "RLF1006": "unknown-unit",
    "RLF1007": "wrong-type",
    "RLF1008": "missing-field",
    "RLF1009": "other-rows",
    "RLF1010": "out-of-range",
    "RLF1011": "unknown-override",
    "RLF1012": "missing-file",
    "RLF1013": "unused-value",
    "RLF1014": "not-trainable",
    "RLF1015": "no-training",
    "RLF1016": "same-weights",
    "RLF1017": "kl-without-effect",
    "RLF1018": "normalised-twice",
    "RLF1019": "kl-twice",
    "RLF1020": "loss-made-larger",
    "RLF1021": "shared-weights",
    # 2xxx placement, memory, resources
    "RLF2001": "does-not-divide",
    "RLF2002": "group-too-small",
    "RLF2003": "not-enough-devices",
    "RLF2004": "does-not-fit",
    "RLF2005": "not-placed",
    "RLF2006": "without-effect",
    "RLF2007": "idle-pool",
    "RLF2008": "no-placement",
    "RLF2009": "not-enough-cpus",
    "RLF2020": "communicators-do-not-fit",
    "RLF2021": "slow-links",
    # 3xxx staleness, versions, schedule
    "RLF3001": "staleness-not-allowed",
    "RLF3002": "no-correction",
    "RLF3003": "more-than-in-flight",
    "RLF3004": "samples-too-old",
    "RLF3005": "no-bound-per-sample",
    "RLF3006": "biased-by-dropping",
    "RLF3007": "deadlock",
    "RLF3008": "trigger-and-rule",
    # 4xxx plan and backend capability
    "RLF4001": "not-a-plan",
    "RLF4002": "source-changed",
    "RLF4003": "not-supported-yet",
    "RLF4004": "time-not-known",
    "RLF4005": "not-a-profile",
    "RLF4006": "foreign-profile",
    "RLF4007": "not-in-profile",
    "RLF4008": "unknown-target",
    "RLF4009": "not-overwritten",
    "RLF4010": "wrong-launch-option",
    "RLF4011": "too-large-to-ship",
    "RLF4012": "mixed-hosts",
    "RLF4020": "device-environment",
    # 5xxx runtime
    "RLF5001": "model-without-weights",
    "RLF5002": "bad-data-row",
    "RLF5003": "reward-raised",
    "RLF5004": "reward-timeout",
    "RLF5005": "reward-result",
    "RLF5006": "stage-failed",
    "RLF5007": "prompt-too-long",
    "RLF5008": "no-resources",
    "RLF5009": "not-finite",
    "RLF5010": "bad-checkpoint",
    "RLF5011": "worker-died",
    "RLF5012": "missing-package",
    "RLF5013": "bad-model",
    "RLF5014": "bad-reward-function",
    "RLF5015": "bad-data",
    "RLF5016": "too-few-groups",
    "RLF5017": "environment-failed",
    "RLF5018": "weights-not-published",
    "RLF5019": "waited-too-long",
    "RLF5030": "kernel-input",
    "RLF5031": "unknown-kernel",
    "RLF5032": "no-device",
    "RLF5033": "not-resident",
    "RLF5034": "memory-above-limit",
    "RLF5040": "sample-too-old",
    "RLF5041": "samples-late",
    "RLF5042": "admission-lost",
    "RLF5045": "damaged-checkpoint",
    "RLF5046": "other-checkpoint",
    "RLF5050": "rank-hangs",
    "RLF5057": "sleeps-too-short",
    "RLF5058": "rows-not-as-put",
    "RLF5060": "unknown-log-target",
    "RLF5061": "log-target-not-installed",
    "RLF5062": "log-target-failed",
    "RLF5064": "rows-lost",
    "RLF5065": "queue-died",
    "RLF5066": "queue-misuse",
    "RLF5067": "producer-failed",
    # 9xxx internal
    "RLF9001": "internal-error",
}

WARNINGS: Final[frozenset[str]] = frozenset(
    {
        "RLF0006",
        "RLF0007",
        "RLF1013",
        "RLF1017",
        "RLF1020",
        "RLF2007",
        "RLF2021",
        "RLF3005",
        "RLF3006",
        "RLF4007",
        "RLF5057",
    }
)
"""Codes that are warnings; all others are errors."""

PAGES: Final = Path(__file__).with_name("pages")
"""The folder docs/errors: through a link in the tree, as package data in the wheel."""


def slug(code: str) -> str:
    """The readable name of a code; KeyError for a code that is not in the table."""
    return CODES[code]


def page_path(code: str) -> Path:
    """Where the page of a code is; KeyError for a code that is not in the table."""
    slug(code)
    return PAGES / f"{code}.md"


def page_text(code: str) -> str:
    """The Markdown page of a code; empty when this installation has no pages."""
    try:
        return page_path(code).read_text("utf-8")
    except OSError:
        return ""


def find_code(text: str) -> str | None:
    """The code that a person means by `rlf1003`, `1003`, `error[RLF1003]` or `unknown-keyword`; None for no code."""
    word = text.strip().lower().removeprefix("error[").removeprefix("warning[").removesuffix("]").replace("_", "-")
    if word.isdecimal() and word.isascii():
        word = f"rlf{word.zfill(4)}"
    for code, name in CODES.items():
        if word in (code.lower(), name):
            return code
    return None
