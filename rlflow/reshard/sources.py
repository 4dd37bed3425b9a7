"""Choice of sources: which holder sends how much of every class, so that the busiest link carries the least.

A linear program for small cases: minimise T, where for every device and node what it sends first hand is at most T
times its bandwidth. Otherwise, where it is good enough, and as the rival of the program's rounded answer, a greedy
choice: the deliveries with the fewest sources first, in equal quanta, each from the source whose links are done first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

from rlflow.reshard.atoms import AtomClass
from rlflow.reshard.endpoint import Fabric
from rlflow.reshard.routes import Delivery, Loads, Route
from rlflow.reshard.shares import WHOLE, Share, share_elements

LP_UP_TO = 2000
"""Variables of the linear program: pairs of a delivery and a source."""
MAX_QUANTA = 24


def choose_sources(
    classes: Sequence[AtomClass],
    found: Sequence[Delivery],
    fabric: Fabric,
    *,
    multicast: bool,
    min_elements: int,
    good_enough: float = 0.0,
) -> tuple[list[Route], Loads, str]:
    """Routes, their loads, and the method: `lp`, `greedy`, or `forced` where no class has a choice.

    Shares are at least `min_elements` large where possible. `good_enough` is the time of the busiest link, in seconds
    for elements of one byte, with which the greedy choice is taken without solving the program.
    """

    def measured(split: Callable[[Loads, Delivery], list[Share]]) -> tuple[list[Route], Loads]:
        """Routes in the order of `found`, chosen in the order of freedom."""
        loads = Loads(fabric)
        routes: dict[int, Route] = {}
        for index in order:
            delivery = found[index]
            turned = []
            shares = split(loads, delivery)
            loads.add_receivers(delivery, sizes[index], multicast=multicast)
            for position, share in enumerate(shares):
                size = share_elements(classes[delivery.number], share.low, share.high, min_elements)
                turned.append(loads.turned(delivery, share, position))
                loads.add_share(delivery, turned[-1], size, multicast=multicast)
            routes[index] = Route(delivery, tuple(turned))
        return [routes[index] for index in range(len(found))], loads

    sizes = [classes[delivery.number].elements for delivery in found]
    order = sorted(range(len(found)), key=lambda i: (len(found[i].sources), -sizes[i], i))
    greedy = measured(
        lambda loads, d: _fill(loads, d, classes[d.number].elements, multicast=multicast, min_elements=min_elements)
    )
    if all(len(delivery.sources) == 1 for delivery in found):
        return (*greedy, "forced")
    variables = sum(len(delivery.sources) for delivery in found)
    if variables > LP_UP_TO or greedy[1].seconds(1) <= good_enough:
        return (*greedy, "greedy")
    amounts = dict(zip(found, _linear_program(found, sizes, fabric, multicast=multicast), strict=True))
    program = measured(lambda _, delivery: _shares(delivery.sources, amounts[delivery]))
    if program[1].seconds(1) <= greedy[1].seconds(1):
        return (*program, "lp")
    return (*greedy, "greedy")


def _shares(sources: Sequence[int], amounts: Sequence[float]) -> list[Share]:
    """Proportions as intervals that tile [0, WHOLE); empty ones are left out."""
    total = sum(amounts)
    shares: list[Share] = []
    low, running = 0, 0.0
    for source, amount in zip(sources, amounts, strict=True):
        running += amount
        high = round(WHOLE * running / total)
        if high > low:
            shares.append(Share(source, low, high))
            low = high
    if low < WHOLE:
        last = shares.pop()
        shares.append(Share(last.source, last.low, WHOLE))
    return shares


def _fill(loads: Loads, delivery: Delivery, elements: int, *, multicast: bool, min_elements: int) -> list[Share]:
    sources = delivery.sources
    if len(sources) == 1:
        return [Share(sources[0], 0, WHOLE)]
    fabric = loads.fabric
    copies = 1 if multicast else delivery.receivers
    quanta = max(1, min(4 * len(sources), elements // max(min_elements, 1), MAX_QUANTA))
    each = elements / quanta * copies
    remote = each if delivery.remote else 0.0
    around = max(sources) + 1
    device = {s: float(loads.device_out.get(s, 0)) for s in sources}
    taken = dict.fromkeys(sources, 0)
    # By node: (when the port of a source would be done with one quantum more, its turn, the source). The sources of a
    # node share its uplink, so that the first of them is the best of them.
    queues: dict[int, list[tuple[float, int, int]]] = {}
    for source in sources:
        port = (device[source] + each) / fabric.device_bandwidth[source]
        turn = (source - delivery.turn) % around
        queues.setdefault(fabric.node_of[source], []).append((port, turn, source))
    for queue in queues.values():
        heapify(queue)
    node = {home: float(loads.node_out.get(home, 0)) for home in queues}

    def done(home: int) -> tuple[float, float, int]:
        """When the links of the best source of a node would be done with one quantum more."""
        port, turn, _ = queues[home][0]
        uplink = (node[home] + remote) / fabric.node_bandwidth[home] if delivery.remote else 0.0
        return max(port, uplink), port + uplink, turn

    for _ in range(quanta):
        home = min(queues, key=done)
        _, turn, chosen = queues[home][0]
        taken[chosen] += 1
        device[chosen] += each
        node[home] += remote
        port = (device[chosen] + each) / fabric.device_bandwidth[chosen]
        heapreplace(queues[home], (port, turn, chosen))
    return _shares(sources, [taken[s] for s in sources])


def _linear_program(
    found: Sequence[Delivery], sizes: Sequence[int], fabric: Fabric, *, multicast: bool
) -> list[list[float]]:
    """Amount of every source of every delivery. Variables: the amounts in units of the largest size, then T."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    unit = float(max(sizes))
    speed = max(*fabric.device_bandwidth, *fabric.node_bandwidth.values())
    starts, columns = [], 0
    link_rows: dict[tuple[str, int], int] = {}
    entries: list[tuple[int, int, float]] = []
    for delivery in found:
        starts.append(columns)
        copies = 1.0 if multicast else float(delivery.receivers)
        for source in delivery.sources:
            row = link_rows.setdefault(("device", source), len(link_rows))
            entries.append((row, columns, copies * speed / fabric.device_bandwidth[source]))
            if delivery.remote:
                home = fabric.node_of[source]
                row = link_rows.setdefault(("node", home), len(link_rows))
                entries.append((row, columns, copies * speed / fabric.node_bandwidth[home]))
            columns += 1
    entries += [(row, columns, -1.0) for row in link_rows.values()]
    row_of, column_of, values = zip(*entries, strict=True)
    upper = coo_matrix((values, (row_of, column_of)), shape=(len(link_rows), columns + 1))
    ends = [*starts[1:], columns]
    owner = np.repeat(np.arange(len(found)), [end - start for start, end in zip(starts, ends, strict=True)])
    equal = coo_matrix((np.ones(columns), (owner, np.arange(columns))), shape=(len(found), columns + 1))
    solved = linprog(
        c=[*([0.0] * columns), 1.0],
        A_ub=upper.tocsr(),
        b_ub=np.zeros(len(link_rows)),
        A_eq=equal.tocsr(),
        b_eq=np.array(sizes) / unit,
        method="highs",
    )
    if solved.status != 0:
        raise RuntimeError(f"the linear program of the sources was not solved: {solved.message}")
    return [[max(float(x), 0.0) for x in solved.x[start:end]] for start, end in zip(starts, ends, strict=True)]
