"""Names that Kubernetes, Ray and Slurm take, from names that the language takes."""

from __future__ import annotations

import re

LONGEST = 40
"""KubeRay puts more words behind the name of a RayJob, and names of pods end at 63 characters."""


def legal_name(text: str) -> str:
    """Letters, digits and `-` in lower case, a letter first (RFC 1035), at most LONGEST; "" when nothing is left."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^[0-9-]+", "", words)[:LONGEST].rstrip("-")


def job_name(flow: str, digest: str) -> str:
    """The flow's name made legal, and 8 digits of the plan's digest: flows whose names differ in what is not legal, and
    plans of one flow, stay apart."""
    return f"{legal_name(flow)[: LONGEST - 9].rstrip('-') or 'flow'}-{digest[:8]}"
