"""A controller as plain JSON, and back: for checkpoints, at any moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.protocol.book import Group, OpenStep
from rlflow.protocol.controller import Controller
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.evict import Evict
from rlflow.protocol.gate import CountGate
from rlflow.protocol.ledger import Ledger, Place
from rlflow.protocol.rules import Wait
from rlflow.protocol.samples import Sample
from rlflow.protocol.settings import Settings
from rlflow.protocol.tally import Tally
from rlflow.protocol.units import Unit

FORMAT = 1


def save(controller: Controller) -> dict[str, Any]:
    """Everything that decides what happens next, in an order that does not depend on hashing."""
    c = controller
    return {
        "format": FORMAT,
        "settings": c.settings.to_json(),
        "gate": c.gate.to_json(),
        "ledger": {place.value: count for place, count in c.ledger.credits.items()},
        "samples": [sample.to_json() for sample in c.samples.values()],
        "groups": [[id, group.members, group.lost] for id, group in c.groups.items()],
        "units": [[unit.id, unit.version, unit.deadline, unit.birth] for unit in c.rule.units.values()],
        "arrived": list(c.rule.arrived),
        "steps": [[step, list(it.groups), it.complete, it.trained] for step, it in c.steps.items()],
        "step": c.step,
        "closed": c.closed,
        "tally": c.tally.to_json(),
        "next_sample": c.next_sample,
        "next_group": c.next_group,
    }


def restore(data: Mapping[str, Any]) -> Controller:
    """The controller that was saved. Raises `ProtocolError` for another format or counts that do not agree.

    Samples that were running are running still: `interrupt` or `restart` those whose engine is gone.
    """
    if data.get("format") != FORMAT:
        raise ProtocolError(f"saved in format {data.get('format')!r}, this rlflow reads {FORMAT}")
    c = Controller(Settings.from_json(data["settings"]))
    c.gate = CountGate.from_json(data["gate"])
    if isinstance(c.rule, Wait | Evict):
        c.rule.bound = c.gate.bound
    credits = {Place(name): count for name, count in data["ledger"].items()}
    c.ledger = Ledger(sum(credits.values()), credits)
    c.samples = {row["id"]: Sample.from_json(row) for row in data["samples"]}
    c.groups = {id: Group(list(members), lost) for id, members, lost in data["groups"]}
    for id, version, deadline, birth in data["units"]:
        c.rule.add(Unit(id, version, deadline, birth))
    for id in data["arrived"]:
        c.rule.finish(id)
    c.steps = {step: OpenStep(list(groups), complete, trained) for step, groups, complete, trained in data["steps"]}
    c.step, c.closed = data["step"], data["closed"]
    c.tally = Tally.from_json(data["tally"])
    c.next_sample, c.next_group = data["next_sample"], data["next_group"]
    c.check()
    return c
