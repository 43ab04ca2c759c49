"""What crosses slices: bytes, and the note where every layer waits for it."""

import re

import jax
import pytest
from planned_transformer import F32, PARAMS, plan_of


def sliced_plan(layout):
    return plan_of(layout, mesh="slice=2, data=4", topology="2x v5e:2x2")


def test_what_crosses_slices():
    hsdp = sliced_plan("batch: slice+data; embed: data")
    # each device's quarter of the gradients (every weight has `embed`), all-reduced over two slices; and the loss
    params = sum(x.size * F32 for x in jax.tree.leaves(PARAMS))
    assert hsdp.dcn_bytes == pytest.approx(params / 4 * 2 * 1 / 2, rel=0.01)
    assert not any("other slices" in note for note in hsdp.notes)
    fsdp = sliced_plan("batch: slice+data; embed: slice+data")
    assert fsdp.dcn_bytes > 1.2 * hsdp.dcn_bytes
    (note,) = (n for n in fsdp.notes if "other slices" in n)
    assert "all-gather over slice+data" in note
    assert sliced_plan("batch: data; embed: data").dcn_bytes == 0
    tensor = sliced_plan("batch: data; mlp: slice")
    (note,) = (n for n in tensor.notes if "other slices" in n)
    assert "all-reduce over slice of `batch seq embed`" in note
    assert tensor.dcn_bytes == pytest.approx(sum(c.total_bytes for c in tensor.collectives if c.axes == ("slice",)))
    assert plan_of("batch, embed: data", mesh="data=8", topology="v5e:2x4").dcn_bytes == 0
    # one axis over both slices has the traffic of two axes
    assert plan_of("batch, embed: data", mesh="data=8", topology="2x v5e:2x2").dcn_bytes == pytest.approx(
        fsdp.dcn_bytes
    )


@pytest.mark.parametrize(
    ("mesh", "layout", "fix"),
    [
        ("data=4, slice=2", "batch: slice+data; embed: data", ("slice=2, data=4", None)),
        ("ici=4, dcn=2", "batch: dcn+ici; embed: ici", ("dcn=2, ici=4", None)),
        ("data=8", "batch, embed: data", ("slice=2, data=4", "batch: slice+data; embed: data")),
        ("data=4, model=2", "batch: data; mlp: model; embed: data",
         ("slice=2, data=2, model=2", "batch: slice+data; mlp: model; embed: data")),
        ("slice=2, data=4", "batch, embed: slice+data", (None, "batch: slice+data; embed: data")),
        ("slice=2, data=4", "batch: data; mlp: slice", (None, "batch: slice+data")),
    ],
)  # fmt: skip
def test_the_note_has_the_mesh_and_the_layout_with_which_weights_stay_in_a_slice(mesh, layout, fix):
    def plan(mesh, layout):
        return plan_of(layout, mesh=mesh, topology="2x v5e:2x2")

    (note,) = (n for n in plan(mesh, layout).notes if "other slices" in n)
    given = [re.search(f'--{what} "(.*?)"', note) for what in ("mesh", "layout")]
    assert tuple(found and found[1] for found in given) == fix
    assert ("is not first" in note) == (("slice=2" in mesh or "dcn=2" in mesh) and fix[0] is not None)
    assert not any("other slices" in n for n in plan(fix[0] or mesh, fix[1] or layout).notes)
