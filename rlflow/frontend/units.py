"""Units of the language: what each word measures, and its size in the base unit of that measure."""

from __future__ import annotations

from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """`dimension` is what it measures; one of it is `scale` base units (microseconds, bytes, bytes/s, flop/s)."""

    dimension: str
    scale: float = 1


def _units() -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    for count in ("prompt", "sample", "token", "step", "device", "epoch", "host"):
        table[count] = table[count + "s"] = Unit(count + "s")
    for word, microseconds in (("us", 1), ("ms", 1e3), ("s", 1e6), ("min", 60e6), ("h", 3600e6)):
        table[word] = Unit("time", microseconds)
    for i, prefix in enumerate("KMGTP", start=1):
        table[f"{prefix}iB"] = Unit("memory", 1024**i)
        table[f"{prefix}B"] = Unit("memory", 1000**i)
        table[f"{prefix}B/s"] = Unit("bandwidth", 1000**i)
        table[f"{prefix}iB/s"] = Unit("bandwidth", 1024**i)
    table["B"] = Unit("memory")
    table["GFLOPS"] = Unit("compute", 1e9)
    table["TFLOPS"] = Unit("compute", 1e12)
    table["PFLOPS"] = Unit("compute", 1e15)
    table["%"] = Unit("share", 0.01)
    return table


UNITS: dict[str, Unit] = _units()

COUNTS = ("prompts", "samples", "tokens", "steps", "devices", "epochs", "hosts")

EXAMPLES = {
    "time": "5 s",
    "memory": "64 GiB",
    "bandwidth": "200 GB/s",
    "compute": "376 TFLOPS",
    "share": "75%",
}
