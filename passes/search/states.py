"""Dynamic programs over the stages of a pool in step order.

A state is the layout classes of the stages that still have a reshard to come. For a cycle of consecutive stages these
are the first and the last, which makes it the cyclic Viterbi algorithm. Choices that exceed the seconds of a bound
even with the fastest options for the stages to come are dropped on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from rlflow.passes.search.options import COSTS, StageOption

SLACK = 1e-12
"""Relative. Bounds are pruned with this much room, since sums in another order round differently."""

PairCost = Callable[[int, Hashable, int, Hashable], float]
"""Seconds of the reshard from a stage (position, class) to another; never negative."""

SwapCost = Callable[[int, int], float]
"""Seconds of swapping for static and peak bytes; does not decrease with either."""

Links = Sequence[tuple[int, int]]
Key = tuple[Hashable, ...]
Chain = tuple[StageOption, "Chain"] | tuple[()]
"""Options from the last to the first."""

Label = tuple[float, int, int, Chain]
"""Seconds, static bytes, peak bytes, and the choice."""


class _Stages:
    """What both programs walk over: for every stage its options within the bound, and the states before and after."""

    def __init__(self, options: Sequence[Sequence[StageOption]], links: Links, reshard: PairCost, bound: float) -> None:
        """`bound` is for the seconds of stages and reshards."""
        count = len(options)
        least = [min(o.seconds for o in some) for some in options]
        self.rest = [0.0] * (count + 1)
        """Least seconds of the stages from a position on."""
        for i in reversed(range(count)):
            self.rest[i] = self.rest[i + 1] + least[i]
        spare = bound - self.rest[0] + SLACK * bound
        self.options = [[o for o in some if o.seconds - own <= spare] for some, own in zip(options, least, strict=True)]
        # Positions within (*state before, class of stage i): where each link that stage i completes begins and ends,
        # and what stays for the state after.
        self._closing: list[list[tuple[int, int, int, int]]] = []
        self._staying: list[list[int]] = []
        kept: tuple[int, ...] = ()
        for i in range(count):
            here = (*kept, i)
            self._closing.append([(a, here.index(a), b, here.index(b)) for a, b in links if max(a, b) == i])
            kept = tuple(j for j in here if any(min(a, b) == j and max(a, b) > i for a, b in links))
            self._staying.append([here.index(j) for j in kept])
        self._reshard = reshard

    def step(self, i: int, key: Key, layout_class: Hashable) -> tuple[float, Key]:
        """Seconds of the reshards that stage i completes in this class, and the state after it."""
        here = (*key, layout_class)
        moved = 0.0
        for a, at_a, b, at_b in self._closing[i]:
            moved += self._reshard(a, here[at_a], b, here[at_b])
        return moved, tuple([here[j] for j in self._staying[i]])


def fastest(
    options: Sequence[Sequence[StageOption]], links: Links, reshard: PairCost, bound: float
) -> list[StageOption] | None:
    """The choice with the least seconds whatever its bytes, if at most `bound`."""
    stages = _Stages(options, links, reshard, bound)
    states: dict[Key, tuple[float, Chain]] = {(): (0.0, ())}
    for i, some in enumerate(stages.options):
        by_class: dict[Hashable, StageOption] = {}
        for option in some:
            best = by_class.get(option.layout_class)
            if best is None or COSTS(option) < COSTS(best):
                by_class[option.layout_class] = option
        grown: dict[Key, tuple[float, Chain]] = {}
        left = bound - stages.rest[i + 1]
        for key, (seconds, chain) in states.items():
            for layout_class, option in by_class.items():
                total = seconds + option.seconds
                if total > left:
                    continue
                moved, after = stages.step(i, key, layout_class)
                total += moved
                if total <= left and (after not in grown or total < grown[after][0]):
                    grown[after] = (total, (option, chain))
        states = grown
    found = min(states.values(), key=lambda state: state[0], default=None)
    return None if found is None else list(_in_order(found[1]))


def fastest_within(
    options: Sequence[Sequence[StageOption]],
    links: Links,
    reshard: PairCost,
    swap: SwapCost,
    bound: float,
) -> list[StageOption] | None:
    """The choice with the least seconds and swap(static bytes, peak bytes) together, if at most `bound`.

    Labels of one state that are nowhere better in seconds and bytes are dropped: `swap` does not decrease with bytes.
    """
    narrowed = _narrow(options, swap, bound)
    if narrowed is None:
        return None
    stages = _Stages(narrowed, links, reshard, bound)
    spare = [0] * (len(options) + 1)
    for i in reversed(range(len(options))):
        spare[i] = spare[i + 1] + min((o.static_bytes for o in stages.options[i]), default=0)
    states: dict[Key, list[Label]] = {(): [(0.0, 0, 0, ())]}
    for i, some in enumerate(stages.options):
        grown: dict[Key, list[Label]] = {}
        left = bound - stages.rest[i + 1]
        for key, labels in states.items():
            steps: dict[Hashable, tuple[float, list[Label]]] = {}
            quickest = min(label[0] for label in labels)
            for option in some:
                if quickest + option.seconds > left:
                    continue
                if option.layout_class not in steps:
                    moved, after = stages.step(i, key, option.layout_class)
                    steps[option.layout_class] = moved, grown.setdefault(after, [])
                moved, target = steps[option.layout_class]
                for label in labels:
                    new = _extend(label, option, moved)
                    if new[0] <= left and new[0] + swap(new[1] + spare[i + 1], new[2] + spare[i + 1]) <= left:
                        _keep(target, new)
        states = {key: labels for key, labels in grown.items() if labels}
    ends = [label for labels in states.values() for label in labels]
    best = min(ends, key=lambda e: (e[0] + swap(e[1], e[2]), e[2], e[1]), default=None)
    return None if best is None else list(_in_order(best[3]))


def _narrow(
    options: Sequence[Sequence[StageOption]], swap: SwapCost, bound: float
) -> Sequence[Sequence[StageOption]] | None:
    """The options that can be part of a choice within the bound; None when a stage has none left.

    Each is tried with the least seconds and bytes of the others; what goes may raise those, until nothing changes.
    """
    room = bound * (1.0 + SLACK)
    while True:
        seconds = [min(o.seconds for o in some) for some in options]
        static = [min(o.static_bytes for o in some) for some in options]
        extra = [min(o.peak_bytes - o.static_bytes for o in some) for some in options]
        kept: list[list[StageOption]] = []
        for i, some in enumerate(options):
            left = room - (sum(seconds) - seconds[i])
            others = sum(static) - static[i]
            most = max((e for j, e in enumerate(extra) if j != i), default=0)
            mine = [o for o in some if o.seconds <= left]
            kept.append(
                [
                    o
                    for o in mine
                    if o.seconds + swap(others + o.static_bytes, others + max(o.static_bytes + most, o.peak_bytes))
                    <= left
                ]
            )
        if not all(kept):
            return None
        if sum(map(len, kept)) == sum(map(len, options)):
            return kept
        options = kept


def leanest(options: Sequence[Sequence[StageOption]]) -> list[StageOption]:
    """The choice with the least peak, then the least static bytes; every stage needs an option."""
    labels: list[Label] = [(0.0, 0, 0, ())]
    for some in options:
        grown: list[Label] = []
        for label in labels:
            for option in some:
                seconds, static, peak, chain = _extend(label, option, 0.0)
                _keep(grown, (0.0 * seconds, static, peak, chain))
        labels = grown
    return list(_in_order(min(labels, key=lambda label: (label[2], label[1]))[3]))


def _extend(label: Label, option: StageOption, moved: float) -> Label:
    """The label with one more stage: its static bytes stay for the others, theirs stay while it runs."""
    seconds, static, peak, chain = label
    peak = max(peak + option.static_bytes, static + option.peak_bytes)
    return seconds + option.seconds + moved, static + option.static_bytes, peak, (option, chain)


def _keep(labels: list[Label], new: Label) -> None:
    """Insert by Pareto dominance; of equal labels the earlier one stays."""
    seconds, static, peak, _ = new
    for label in labels:
        if label[0] <= seconds and label[1] <= static and label[2] <= peak:
            return
    labels[:] = [label for label in labels if label[0] < seconds or label[1] < static or label[2] < peak]
    labels.append(new)


def _in_order(chain: Chain) -> Iterator[StageOption]:
    found: list[StageOption] = []
    while chain:
        option, chain = chain
        found.append(option)
    return reversed(found)
