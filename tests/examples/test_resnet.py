"""The ResNet-50 of the examples: its size, its plan, and equal runs under its layouts at a small size."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
import resnet


def test_the_size_is_that_of_the_published_model():
    _, (state, _), _ = resnet.resnet50()
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(state["params"])) == 25_557_032


@pytest.fixture(scope="module")
def plan():
    step, args, dims = resnet.resnet50(batch=256)
    return mp.plan(step, *args, mesh="data=16", topology="v5e:4x4", layout=resnet.DATA, dims=dims)


def test_its_flops_are_those_of_the_published_model(plan):
    forward = 2 * 4.09e9 * 256  # 4.09e9 products an image
    assert plan.time.model_flops == pytest.approx(3 * forward, rel=0.03)  # but for the cotangent of the images


def test_the_statistics_are_of_the_global_batch(plan):
    norms = sum(path.path.endswith("/mean") for path in plan.inputs)
    assert norms == 53
    summed = [c for c in plan.collectives if c.op == "all-reduce" and "mean" not in c.dims]
    assert len(summed) >= 4 * norms  # mean and mean of squares, and the gradients of scale and bias


@pytest.mark.slow
def test_no_layout_changes_a_number(monkeypatch):
    monkeypatch.setattr(resnet, "STAGES", (1, 1))
    step, shapes, dims = resnet.resnet50(8, 32, width=4, classes=8, dtype=jnp.float32)
    rng = np.random.default_rng(0)

    def real(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return rng.integers(0, 8, x.shape, dtype=np.int32)
        return np.asarray(rng.normal(size=x.shape) * 0.3 + 0.5, x.dtype)

    report = mp.check(
        step, *jax.tree.map(real, shapes), dims=dims, meshes=["data=4, model=2"], lowerings=("shard_map",),
        layouts=[resnet.LAYOUTS["features"], resnet.LAYOUTS["data+height"]], tolerance=1e-3,
    )  # fmt: skip
    assert report.ok
