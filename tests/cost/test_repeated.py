"""Products that several devices do alike are counted, and said."""

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar.cost.flops import repeated_products

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
UP, DOWN = jax.ShapeDtypeStruct((32, 128), jnp.float32), jax.ShapeDtypeStruct((128, 32), jnp.float32)
DIMS = {"x": "batch embed", "up": "embed mlp", "down": "mlp embed"}


def mlp(x, up, down):
    return jnp.tanh(x @ up) @ down


def plan_of(layout, mesh="data=4, model=2"):
    return mp.plan(mlp, X, UP, DOWN, mesh=mesh, layout=layout, dims=DIMS)


@pytest.mark.parametrize("layout", ["batch: data; mlp: model", "batch: data+model"])
def test_a_layout_that_splits_every_product_repeats_none(layout):
    plan = plan_of(layout)
    assert repeated_products(plan) == []
    assert "more than once" not in str(plan)


@pytest.mark.parametrize(
    ("layout", "axes", "times"),
    [("batch: data", ("model",), 2), ("mlp: model", ("data",), 4), ("", ("data", "model"), 8)],
)
def test_what_is_whole_on_an_axis_is_done_by_every_device_along_it(layout, axes, times):
    plan = plan_of(layout)
    found = repeated_products(plan)
    assert {(r.axes, r.times) for r in found} == {(axes, times)}
    devices = 8
    needed = 2 * 2 * 64 * 32 * 128 / devices
    assert sum(r.flops for r in found) == times * needed
    assert sum(r.share for r in found) == pytest.approx(1 - 1 / times)
    text = str(plan)
    assert f"{times} × the FLOPs needed" in text
    assert "test_repeated.py" in text


def test_a_dim_that_does_not_divide_is_said_too():
    plan = mp.plan(lambda x, up: x @ up, jax.ShapeDtypeStruct((6, 32), jnp.float32), UP, mesh="data=4", layout="batch?: data",
                   dims={"x": "batch embed", "up": "embed mlp"})  # fmt: skip
    (found,) = repeated_products(plan)
    assert (found.axes, found.times, found.share) == (("data",), 4, 0.75)
