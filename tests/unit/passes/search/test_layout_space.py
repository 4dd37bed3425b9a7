"""Layouts: all legal ones, each once."""

from __future__ import annotations

from itertools import product

import pytest

from rlflow.ir.flow import Layout
from rlflow.passes.search.layout_space import LayoutChoice, LayoutSpace, mesh_class, split_layers, stage_table


def test_dense_meshes_are_all_products() -> None:
    space = LayoutSpace(layers=36)
    found = [(c.layout.tp, c.layout.pp, c.layout.dp) for c in space.choices(16)]
    assert sorted(found) == sorted(
        (t, p, 16 // (t * p)) for t, p in product((1, 2, 4, 8), (1, 2, 4, 8, 16)) if 16 % (t * p) == 0
    )
    assert len(found) == len(set(found))


def test_experts_lie_over_the_devices_of_a_pipeline_stage() -> None:
    """p * max(t * c, e * e_tp) divides the devices, for powers of two."""
    axes = (1, 2, 4, 8)
    space = LayoutSpace(48, axes, axes, (1, 2), expert=(1, 4, 8, 32), expert_tensor=(1, 2))
    for devices in (1, 8, 64):
        found = {(m.tp, m.pp, m.cp, m.ep, m.etp) for m in space.meshes(devices)}
        expected = {
            (t, p, c, e, x)
            for t, p, c, e, x in product(axes, axes, (1, 2), (1, 4, 8, 32), (1, 2))
            if devices % (p * max(t * c, e * x)) == 0
        }
        assert found == expected
        assert all(m.size == devices and m.expert_replicas >= 1 for m in space.meshes(devices))


@pytest.mark.parametrize(
    ("layers", "parts", "split"),
    [(36, 4, ()), (61, 4, (15, 16, 15, 15)), (7, 4, (2, 2, 2, 1)), (10, 4, (2, 3, 3, 2)), (3, 2, (2, 1)), (5, 5, ())],
)
def test_uneven_pipelines_spare_the_ends(layers: int, parts: int, split: tuple[int, ...]) -> None:
    assert split_layers(layers, parts) == split
    assert not split or (sum(split) == layers and max(split) - min(split) == 1)


def test_without_uneven_stages_the_layers_divide() -> None:
    space = LayoutSpace(6, (1,), (1, 2, 3, 4), virtual=(1, 2), micro_batches=(12,), uneven=False)
    found = {(c.layout.pp, c.layout.vp) for c in space.choices(12)}
    assert found == {(1, 1), (2, 1), (3, 1), (3, 2)}
    uneven = {
        (c.layout.pp, c.layout.vp)
        for c in LayoutSpace(6, (1,), (1, 2, 3, 4), virtual=(1, 2), micro_batches=(12,)).choices(12)
    }
    assert uneven == found | {(4, 1), (2, 2)}, "at most one stage per layer: not (4, 2)"


def test_interleaving_needs_whole_turns_of_micro_batches() -> None:
    space = LayoutSpace(8, (1,), (2,), virtual=(1, 2), micro_batches=(3, 4))
    found = {(c.layout.vp, c.micro_batches) for c in space.choices(2)}
    assert found == {(1, 3), (1, 4), (2, 4)}


def test_settings_without_a_meaning_make_no_copies() -> None:
    space = LayoutSpace(8, (1, 2), (1,), zero=(1, 3), sequence_parallel=(True, False), recompute=("none", "full"))
    found = list(space.choices(2))
    assert len(found) == len(set(found))
    told = {(c.layout.tp, c.layout.zero, c.layout.sp, c.layout.recompute) for c in found}
    assert told == {(1, z, False, r) for z in (1, 3) for r in ("none", "full")} | {
        (2, 0, s, r) for s in (True, False) for r in ("none", "full")
    }


def test_rules_see_meshes_and_choices() -> None:
    seen: list[Layout] = []

    def heads(mesh: Layout) -> bool:
        seen.append(mesh)
        return mesh.tp <= 2

    def no_offload_with_pipeline(choice: LayoutChoice) -> bool:
        return not (choice.offload and choice.layout.pp > 1)

    space = LayoutSpace(8, (1, 2, 4), (1, 2), offload=(False, True), legal_mesh=heads, legal=no_offload_with_pipeline)
    found = {(c.layout.tp, c.layout.pp, c.offload) for c in space.choices(4)}
    assert found == {(1, 1, False), (1, 1, True), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, False)}
    assert len(seen) == len(set(seen)) == 5


def test_a_table_of_costed_choices() -> None:
    """Time 64 / n, more with tp; weights over tp and pp; recompute halves the peak and adds a third."""

    def cost(choice: LayoutChoice) -> tuple[float, int, int] | None:
        layout = choice.layout
        if layout.pp == 4:
            return None
        full = layout.recompute == "full"
        static = 32 // layout.model_parallel
        seconds = 64.0 / layout.size * (1.0 + 0.1 * (layout.tp - 1)) * (4 / 3 if full else 1.0)
        return seconds, static, static + (4 if full else 8)

    space = LayoutSpace(8, (1, 2, 4), (1, 2, 4), recompute=("none", "full"))
    table = stage_table(space, (1, 2, 4, 8), cost, 24)
    assert table.least_seconds(1) == float("inf")
    assert table.least_seconds(2) == 32.0, "two pipeline stages of 16 bytes, 24 at the peak"
    assert table.least_seconds(8) == 8.0
    assert {o.layout_class for o in table.options(8)} == {
        mesh_class(LayoutChoice(Layout(tp=t, pp=p))) for t, p in ((2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
    }
    for option in table.options(8):
        assert isinstance(option.layout, LayoutChoice)
        assert option.layout.layout.size == option.devices


@pytest.mark.parametrize("wrong", [{"tensor": ()}, {"tensor": (0,)}, {"zero": ()}, {"layers": 0}])
def test_empty_axes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"axis|axes"):
        LayoutSpace(**{"layers": 8, **wrong})  # type: ignore[arg-type]
