"""What the user chooses about launch files, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlflow.diagnostics import RunFailure, did_you_mean, one_of

TARGETS: Final[dict[str, str]] = {
    "ray-job": "a job for a Ray cluster that is there",
    "kuberay": "a RayJob for Kubernetes with the KubeRay operator",
    "slurm": "a batch script that starts Ray on the hosts of a Slurm job",
}
_ONLY_FOR: Final[dict[str, tuple[str, ...]]] = {
    "image": ("kuberay",),
    "namespace": ("kuberay",),
    "claim": ("kuberay",),
    "working_dir": ("kuberay",),
    "device_resource": ("kuberay", "slurm"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "time": ("slurm",),
}
"""Options that not every target has."""
_LEGAL: Final[dict[str, tuple[str, str]]] = {
    "name": (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "a letter, then letters, digits and `-`, at most 40 in lower case"),
    "image": (r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", "REGISTRY/NAME:TAG"),
    "namespace": (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "letters, digits and `-`, at most 63 in lower case"),
    "claim": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "letters, digits, `-` and `.` in lower case"),
    "working_dir": (
        r"(https|s3|gs|azure|abfss|file)://[^\s'\"\\]+\.zip",
        "a URI that Ray fetches, ending in .zip",
    ),
    "device_resource": (r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?", "the name of a resource"),
    "partition": (r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", "names of partitions with `,` between"),
    "account": (r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "the name of an account"),
    "time": (r"\d+(-\d+(:\d+){0,2})?|\d+(:\d+){1,2}", "MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"),
    "interface": (r"[A-Za-z0-9=^][A-Za-z0-9_.,-]*", "the name of a network interface"),
    "run_dir": (r"/[^\x00-\x1f\x7f]*", "an absolute path, since the hosts of a run have no working folder in common"),
}


@dataclass(frozen=True)
class EmitSettings:
    """Options of `rlflow emit`; "" = not given."""

    target: str
    name: str = ""
    """Of the job; default: the flow's name, made legal, with a digest of the plan."""
    run_dir: str = ""
    """On storage that all hosts of the run see."""
    interface: str = ""
    image: str = ""
    namespace: str = ""
    claim: str = ""
    """A PersistentVolumeClaim that is there, for the run folder."""
    working_dir: str = ""
    """Where job.zip will be fetched from, when it is too large for a ConfigMap."""
    device_resource: str = ""
    partition: str = ""
    account: str = ""
    time: str = ""
    include: tuple[Path, ...] = ()
    """Further files and folders to ship, relative to the .rlflow file."""
    ray_version: str = ""


def option(field: str) -> str:
    """The field as it is written on the command line."""
    return "--" + field.replace("_", "-")


def check_settings(settings: EmitSettings) -> None:
    """RLF4008 for an unknown target; RLF4010 for an option that the target has not, that it needs, or whose value is
    not legal there."""
    if settings.target not in TARGETS:
        guess = did_you_mean(settings.target, TARGETS)
        raise RunFailure(
            "RLF4008",
            f"there are no launch files for the target `{settings.target}`",
            notes=tuple(f"{name}: {what}" for name, what in TARGETS.items()),
            help=(f"did you mean `{guess}`?" if guess else f"write --target with {one_of(TARGETS)}",),
        )
    for field, targets in _ONLY_FOR.items():
        if getattr(settings, field) and settings.target not in targets:
            raise RunFailure(
                "RLF4010",
                f"{option(field)} has no effect with the target `{settings.target}`",
                help=(f"leave it out; it is for {one_of(targets)}",),
            )
    for field, (pattern, words) in _LEGAL.items():
        value = getattr(settings, field)
        if value and not re.fullmatch(pattern, value):
            from rlflow.backends.codegen.names import legal_name

            nearest = legal_name(value) if field in ("name", "namespace", "claim") else ""
            raise RunFailure(
                "RLF4010",
                f"{option(field)} `{_shown(value)}` is not legal: it must be {words}",
                help=(f"the nearest that is: `{nearest}`",) if nearest else (),
            )
    if settings.target == "kuberay" and not settings.image:
        raise RunFailure(
            "RLF4010",
            "the target `kuberay` needs an image for its pods",
            notes=("the pods run rlflow with Ray, torch and what the devices need; rlflow ships no such image",),
            help=("name yours: `--image REGISTRY/NAME:TAG`",),
        )


def _shown(value: str) -> str:
    return value.encode("unicode_escape").decode("ascii")
