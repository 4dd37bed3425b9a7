"""A profile from its file, refused where it is not one or is of something else."""

from __future__ import annotations

from pathlib import Path

from rlflow.cluster.spec import LOCAL
from rlflow.diagnostics import RunFailure
from rlflow.profile.machine import differences, this_machine
from rlflow.profile.table import MachineFacts, Profile

_AGAIN = "measure it here: `rlflow profile FILE.rlflow -o profile.json`"


def read_profile(path: Path) -> Profile:
    """Raises RunFailure RLF4005 when the file is not a profile that this version reads, OSError as `open` does."""
    try:
        return Profile.from_json(path.read_bytes().decode("utf-8"))
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RunFailure(
            "RLF4005",
            f"`{path}` is not a profile that this version of rlflow reads",
            notes=tuple(lines[:4]),
            help=("make it again: `rlflow profile FILE.rlflow -o profile.json`",),
        ) from None


def refuse_foreign(profile: Profile, flow: str, cluster: str, here: MachineFacts | None = None) -> None:
    """RunFailure RLF4006 when the profile is of another flow, another cluster or, for `local`, another machine.

    `here` None = this machine.
    """
    notes = [
        f"{what}: `{measured}` was measured, this is `{now}`"
        for what, measured, now in (("flow", profile.flow, flow), ("cluster", profile.cluster, cluster))
        if measured != now
    ]
    if cluster == LOCAL and not notes:
        notes = differences(profile.machine, here or this_machine())
    if notes:
        raise RunFailure("RLF4006", "the profile was measured for something else", notes=tuple(notes), help=(_AGAIN,))
