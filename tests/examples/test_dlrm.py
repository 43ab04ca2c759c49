"""The DLRM of the examples: its size, its step against NumPy in float64, its plan, and equal runs under two layouts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import count_weights, drawn
from flax import linen as nn
from lowered import same

import dlrm
import meshpar as mp

SMALL = {
    "rows": (5, 3, 24),
    "embed": 8,
    "bottom": (16,),
    "top": (12, 8),
    "dense": 4,
    "multiple": 8,
    "dtype": jnp.float32,
}


def test_the_size_is_that_of_the_benchmark():
    target = dlrm.dlrm()
    table = target[1][0]["table"]
    bottom, top = (13, 512, 256, 128), (128 + 27 * 26 // 2, 1024, 1024, 512, 256, 1)
    widths = [*itertools.pairwise(bottom), *itertools.pairwise(top)]
    assert count_weights(target) == sum((i + 1) * o for i, o in widths)
    assert sum(dlrm.ROWS) == 187_767_399
    assert 0 <= table.shape[0] - sum(dlrm.ROWS) < 4096
    assert round(table.size * 4 / 1e9) == 96  # GB in float32


@pytest.fixture(scope="module")
def small():
    step, shapes, dims = dlrm.dlrm(16, **SMALL)
    state, batch = drawn(shapes, 3)
    batch["clicked"] = (batch["clicked"] > 0).astype(np.float32)
    return step, (state, batch), dims


def test_the_loss_is_that_of_the_paper(small):
    step, (state, batch), _ = small
    p = jax.tree.map(np.float64, nn.meta.unbox(state["params"]))

    def mlp(p, x):
        for name in sorted(p):
            x = np.maximum(x @ p[name]["kernel"] + p[name]["bias"], 0)
        return x

    losses = []
    for dense, rows, clicked in zip(*(batch[k] for k in ("dense", "sparse", "clicked")), strict=True):
        x = mlp(p["bottom"], dense)
        vectors = [x, *(state["table"][first + r] for first, r in zip((0, 5, 8), rows, strict=True))]
        dots = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        (logit,) = mlp(p["top"], np.concatenate([x, dots])) @ p["click"]["kernel"] + p["click"]["bias"]
        losses.append(np.log1p(np.exp(-logit if clicked else logit)))
    after, loss = jax.jit(step)(state, batch)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)
    read = {int(first + r) for rows in batch["sparse"] for first, r in zip((0, 5, 8), rows, strict=True)}
    changed = np.flatnonzero((np.asarray(after["table"]) != state["table"]).any(1))
    assert set(changed) <= read
    assert len(changed) > 5


def test_only_the_rows_of_a_batch_are_sent():
    step, args, dims = dlrm.dlrm()
    plan = mp.plan(step, *args, dims=dims, mesh="data=16", topology="v5e:4x4", layout=dlrm.LAYOUTS["rows"])
    rows = 65536 * 26 * 128 * 4
    assert plan.bytes_sent < 2.2 * rows  # read, and written
    assert plan.argument_bytes() < 1.01 * args[0]["table"].size * 4 / 16


@pytest.mark.slow
def test_no_layout_changes_a_number(small):
    step, args, dims = small
    how = {"meshes": ["data=4, model=2"], "lowerings": ("jit", "shard_map"), "tolerance": 1e-4}
    same(step, *args, layout=dlrm.LAYOUTS["rows+mlp"], dims=dims, **how)
