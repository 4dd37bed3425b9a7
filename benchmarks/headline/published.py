"""What was published, in tokens/s: press summaries of Huawei's articles of June 2025 on RL Fusion and StaleSync."""

from __future__ import annotations

PUBLISHED = {
    ("baseline", 1): 14_000.0,
    ("fusion", 4): 85_000.0,
    ("stalesync", 1): 35_000.0,
    ("stalesync", 4): 127_000.0,
}
FUSION_GAIN = 0.785
"""Over the baseline on one supernode."""
LINEARITY = {"fusion": 0.85, "stalesync": 0.91}
"""On four supernodes."""
CALIBRATED = {("baseline", 1): "calibrated", ("fusion", 4): "its linearity is calibrated"}
"""Cells that a setting was chosen on: they are no evidence."""


def published(schedule: str, supernodes: int) -> float | None:
    """Tokens/s; RL Fusion on one supernode by its gain."""
    if (schedule, supernodes) == ("fusion", 1):
        return PUBLISHED["baseline", 1] * (1 + FUSION_GAIN)
    return PUBLISHED.get((schedule, supernodes))


def two_supernodes(schedule: str) -> tuple[float, float]:
    """Tokens/s between the published ends, which nobody published: with eff(N) = 1 / (1 + c(N)), c growing by doubling
    (the lower) or by supernode (the upper)."""
    one, four = published(schedule, 1), published(schedule, 4)
    assert one is not None
    assert four is not None
    lost = 4 * one / four - 1
    return 2 * one / (1 + lost / 2), 2 * one / (1 + lost / 3)
