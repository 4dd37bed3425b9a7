"""One set of colours for every picture: Okabe and Ito's, which stay apart for colour-blind readers.

Colour is never the only mark: shapes, line styles and words say the same.
"""

from __future__ import annotations

from typing import Final

BLACK: Final = "#000000"
ORANGE: Final = "#E69F00"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
YELLOW: Final = "#F0E442"
BLUE: Final = "#0072B2"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
GREY: Final = "#666666"

INK: Final = "#1A1A1A"
PAPER: Final = "#FFFFFF"

# Outline by what a box is: the op's kind, or the kind of a declaration or instruction.
STROKE: Final[dict[str, str]] = {
    "take": SKY,
    "generate": BLUE,
    "logprobs": PURPLE,
    "score": GREEN,
    "group_normalize": ORANGE,
    "train": VERMILION,
    "data": SKY,
    "model": BLUE,
    "reward": GREEN,
    "publish": BLACK,
    "reshard": BLACK,
    "put": BLACK,
    "queue": BLACK,
    "wait": GREY,
    "checkpoint": GREY,
}


def stroke(kind: str) -> str:
    """The outline colour of a kind; grey for one that has none."""
    return STROKE.get(kind, GREY)


def tint(colour: str, share: float = 0.16) -> str:
    """`colour` mixed with white, `share` (0..1) of it left: a fill on which black text is readable."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + (part - 255) * share):02X}" for part in parts)
