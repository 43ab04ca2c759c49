"""The order of plans of one step: memory, then seconds; the bytes sent where the chip is not known."""

import jax
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.passes.ranked import rank


@pytest.mark.parametrize(("width", "exceeds"), [(1 << 12, False), (1 << 18, True)])
def test_plans_are_ordered_by_memory_and_seconds(width, exceeds):
    how = {"layout": "mlp: model", "dims": {"x": "_ mlp", "w": "mlp _"}}
    args = bf16(1024, width), bf16(width, width)
    on_v5e = mp.plan(lambda x, w: x @ w, *args, mesh="model=4", topology="v5e:2x2", **how)
    assert rank(on_v5e) == (exceeds, on_v5e.seconds)
    anywhere = mp.plan(lambda x, w: x @ w, *args, mesh=jax.sharding.AbstractMesh((4,), ("model",)), **how)
    assert rank(anywhere) == (False, anywhere.bytes_sent)
    assert on_v5e.bytes_sent == anywhere.bytes_sent > 0
