"""The picture of a sweep: what stands where, read back from the SVG."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rlflow.backends.visualizers.sweep import MOST_NOTES, Measure, Row, Sweep, Value, sweep_svg

SVG = "{http://www.w3.org/2000/svg}"
RATE, SHARE = Measure("tokens/s"), Measure("idle", percent=True)


def sweep(*rows: Row, parameters: tuple[str, ...] = ("n",), measures: tuple[Measure, ...] = (RATE,)) -> Sweep:
    return Sweep("title", "remark", parameters, measures, rows)


def drawn(of: Sweep) -> ElementTree.Element:
    return ElementTree.fromstring(sweep_svg(of))


def marks(root: ElementTree.Element) -> list[tuple[float, float, str]]:
    """(x, y, what a pointer is told) of every marker."""
    found = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "value":
            place = re.fullmatch(r"translate\((.*),(.*)\)", group.findall(f"{SVG}g")[0].get("transform", ""))
            assert place is not None
            found.append((float(place[1]), float(place[2]), group.findtext(f"{SVG}title") or ""))
    return found


def words(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def one(setting: str, mean: float, half: float | None = None) -> Row:
    return Row((setting,), (Value(mean, half),))


def test_numbers_stand_to_scale() -> None:
    """4, 8 and 16 on a line; 10 to 1000 at their logarithms, which the axis says."""
    x = [mark[0] for mark in marks(drawn(sweep(one("4 devices", 1), one("16 devices", 3), one("8 devices", 2))))]
    assert x == sorted(x)
    assert (x[2] - x[0]) / (x[1] - x[0]) == pytest.approx(3, abs=0.02)
    wide = drawn(sweep(one("10", 1), one("100", 2), one("1_000", 3)))
    x = [mark[0] for mark in marks(wide)]
    assert x[2] - x[1] == pytest.approx(x[1] - x[0], abs=0.2)
    assert "n (logarithmic)" in words(wide)


def test_values_stand_to_scale_with_their_intervals() -> None:
    root = drawn(sweep(one("1", 100, 10), one("2", 50, 25)))
    (_, high, _), (_, low, _) = marks(root)
    bars = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "bar"]
    ends = [[float(number) for number in re.findall(r"[,V]([\d.]+)", bar)[:2]] for bar in bars]
    unit = (low - high) / 50
    assert [(low_end - high_end) / unit for high_end, low_end in ends] == pytest.approx([20, 50], abs=0.3)
    assert (ends[0][0] + ends[0][1]) / 2 == pytest.approx(high, abs=0.1)


@pytest.mark.parametrize(
    "settings", [("a", "b", "c"), ("4", "8 devices", "16"), ("1", "1.0", "2"), ("[1, 2]", "[3]", "x")]
)
def test_what_are_no_numbers_of_one_unit_stands_side_by_side_without_a_line(settings: tuple[str, ...]) -> None:
    root = drawn(sweep(*(one(setting, 5) for setting in settings)))
    x = [mark[0] for mark in marks(root)]
    gaps = [b - a for a, b in pairwise(x)]
    assert gaps[0] == pytest.approx(gaps[1], abs=0.2)
    assert not [path for path in root.iter(f"{SVG}path") if path.get("class") == "line"]
    assert set(settings) <= set(words(root))


def test_lines_differ_in_colour_marker_and_stroke() -> None:
    rows = [Row((x, y), (Value(float(x) + i),)) for i, y in enumerate("abcdef") for x in ("1", "2")]
    root = drawn(sweep(*rows, parameters=("n", "m")))
    legend = [group for group in root.iter(f"{SVG}g") if group.get("class") == "legend"]
    looks = [(next(g.iter(f"{SVG}path")).attrib, [m.attrib for m in g.findall(f"{SVG}g/*")]) for g in legend]
    assert [g.findtext(f"{SVG}text") for g in legend] == [f"m = {y}" for y in "abcdef"]
    assert len({look[0]["stroke"] for look in looks}) == 6
    assert len({look[0].get("stroke-dasharray", "") for look in looks}) == 6
    assert len({str(look[1]) for look in looks}) == 6
    many = [Row((x, str(y)), (Value(1.0),)) for y in range(30) for x in ("1", "2")]
    paths = [p for p in drawn(sweep(*many, parameters=("n", "m"))).iter(f"{SVG}path") if p.get("class") == "line"]
    assert len({(p.get("stroke"), p.get("stroke-dasharray")) for p in paths}) == 30


def test_what_has_no_result_is_crossed_and_explained() -> None:
    root = drawn(sweep(one("1", 5), Row(("2",), why="error[RLF2001]: <too> many"), parameters=("n",)))
    crosses = [g for g in root.iter(f"{SVG}g") if g.get("class") == "none"]
    assert [g.findtext(f"{SVG}title") for g in crosses] == ["2: error[RLF2001]: <too> many"]
    assert "x  n = 2: error[RLF2001]: <too> many" in words(root)
    bad = [Row((str(i),), why="no") for i in range(20)]
    root = drawn(sweep(*bad))
    assert f"x  {20 - MOST_NOTES} more without a result" in words(root)
    assert "not known" in words(root)


def test_axes_begin_at_zero_unless_all_is_alike() -> None:
    def title(*values: float) -> str:
        root = drawn(sweep(*(one(str(i), value) for i, value in enumerate(values))))
        return next(text for text in words(root) if text.startswith("tokens/s"))

    assert title(10, 30) == "tokens/s"
    assert title(100, 101) == "tokens/s (axis does not begin at 0)"
    assert title(20_000, 90_000) == "tokens/s, thousands"
    root = drawn(sweep(one("1", 100), one("2", 100.1)))
    (_, first, _), (_, second, _) = marks(root)
    assert 0 < first - second < 5, "a tenth of a percent is no difference to look at"


def test_shares_are_percentages_of_the_whole_axis() -> None:
    root = drawn(sweep(one("1", 0.25), one("2", 0.5), measures=(SHARE,)))
    assert {"0%", "100%"} <= set(words(root))
    assert marks(root)[0][2] == "n = 1: idle 25.0%"


def test_unknown_measures_are_left_out() -> None:
    row = Row(("1",), (None, Value(0.5)))
    root = drawn(sweep(row, measures=(RATE, SHARE)))
    assert len(marks(root)) == 1
    assert "not known" in words(root)


def test_labels_do_not_run_into_each_other() -> None:
    root = drawn(sweep(*(one(str(1000 + i), 1.0) for i in range(60))))
    labels = [t for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "middle"]
    x = [float(t.get("x", "")) for t in labels]
    assert 5 < len(x) < 60
    assert min(b - a for a, b in pairwise(x)) > 6.0 * 4


def test_rows_have_what_parameters_and_measures_need() -> None:
    with pytest.raises(ValueError, match="setting a parameter"):
        sweep(Row(("1", "2"), (Value(1.0),)))
    with pytest.raises(ValueError, match="a parameter and a row"):
        sweep()
