"""What crosses slices: bytes, and the hint where every layer waits for it."""

import jax
import pytest
from planned_transformer import F32, PARAMS, plan_of

from meshpar._src.report.hints import slices_hint


def sliced_plan(layout):
    return plan_of(layout, mesh="slice=2, data=4", topology="2x v5e:2x2")


def test_what_crosses_slices():
    hsdp = sliced_plan("batch: slice+data; embed: data")
    # each device's quarter of the gradients (every weight has `embed`), all-reduced over two slices; and the loss
    params = sum(x.size * F32 for x in jax.tree.leaves(PARAMS))
    assert hsdp.dcn_bytes == pytest.approx(params / 4 * 2 * 1 / 2, rel=0.01)
    assert slices_hint(hsdp) is None
    fsdp = sliced_plan("batch: slice+data; embed: slice+data")
    assert fsdp.dcn_bytes > 1.2 * hsdp.dcn_bytes
    hint = slices_hint(fsdp)
    assert hint is not None
    assert "all-gather over slice+data" in hint.text
    assert 0 < hint.seconds < fsdp.seconds
    assert sliced_plan("batch: data; embed: data").dcn_bytes == 0
    tensor = sliced_plan("batch: data; mlp: slice")
    hint = slices_hint(tensor)
    assert hint is not None
    assert "all-reduce over slice of `batch seq embed`" in hint.text
    assert tensor.dcn_bytes == pytest.approx(sum(c.total_bytes for c in tensor.collectives if c.axes == ("slice",)))
    assert plan_of("batch, embed: data", mesh="data=8", topology="v5e:2x4").dcn_bytes == 0
    # one axis over both slices has the traffic of two axes
    assert plan_of("batch, embed: data", mesh="data=8", topology="2x v5e:2x2").dcn_bytes == pytest.approx(
        fsdp.dcn_bytes
    )
