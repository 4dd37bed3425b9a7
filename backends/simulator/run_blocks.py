"""A generate stage as one block of time: all samples of a batch begin and end together."""

from __future__ import annotations

from rlflow.backends.simulator.clock import Process, Signal, Wait
from rlflow.backends.simulator.interpreter_edges import Edge
from rlflow.backends.simulator.interpreter_world import World
from rlflow.backends.simulator.run_turns import Turns


class BlockServer:
    """Takes the time of the plan's estimate. One sample of the controller stands for the batch."""

    def __init__(self, world: World, edge: Edge, turns: Turns | None = None) -> None:
        self._turns = turns
        self._world = world
        self._edge = edge

    def run(self, step: int) -> Process:
        edge, world = self._edge, self._world
        controller = edge.controller
        while not controller.capacity:
            yield Wait(edge.changed, f"permission to generate for step {step} ({controller.ledger})")
        ids = controller.admit()
        for id in ids:
            controller.begin(id, controller.gate.version)
        began = world.clock.now
        yield world.durations.of(edge.stage.id, step)
        world.worked(edge.stage.pool, began, 1.0)
        if self._turns is not None:
            yield self._turns.block_us
        for id in ids:
            controller.finish(id)
        if not edge.trained_elsewhere:
            edge.share(step)  # nobody trains the model: the next batch may begin
        world.clock.fire(edge.changed)

    def hold(self) -> None:
        """A block is one instruction: nothing runs beside the list."""

    def release(self) -> None:
        pass

    @property
    def free(self) -> float:
        return 1.0

    @property
    def changed(self) -> Signal:
        return self._edge.changed

    @property
    def busy(self) -> bool:
        return False

    def share(self, stages: int) -> None:
        pass
