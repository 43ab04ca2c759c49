"""Products that several devices do alike are counted, and said."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.cost.flops import redundant_matmuls

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
UP, DOWN = jax.ShapeDtypeStruct((32, 128), jnp.float32), jax.ShapeDtypeStruct((128, 32), jnp.float32)
DIMS = {"x": "batch embed", "up": "embed mlp", "down": "mlp embed"}


def mlp(x, up, down):
    return jnp.tanh(x @ up) @ down


def plan_of(layout):
    return mp.plan(mlp, X, UP, DOWN, mesh="data=4, model=2", layout=layout, dims=DIMS)


@pytest.mark.parametrize("layout", ["batch: data; mlp: model", "batch: data+model"])
def test_a_layout_that_splits_every_product_repeats_none(layout):
    plan = plan_of(layout)
    assert redundant_matmuls(plan) == []
    assert "more than once" not in str(plan)


@pytest.mark.parametrize(
    ("layout", "axes", "times"),
    [("batch: data", ("model",), 2), ("mlp: model", ("data",), 4), ("", ("data", "model"), 8)],
)
def test_what_is_whole_on_an_axis_is_done_by_every_device_along_it(layout, axes, times):
    plan = plan_of(layout)
    found = redundant_matmuls(plan)
    assert {(r.axes, r.times) for r in found} == {(axes, times)}
    needed = 2 * 2 * 64 * 32 * 128 / 8
    assert sum(r.flops for r in found) == times * needed
    assert sum(r.share for r in found) == pytest.approx(1 - 1 / times)
    text = " ".join(str(plan).split())  # however its lines are wrapped
    assert f"{times} × the FLOPs needed" in text
    assert "test_redundant.py" in text


def test_a_dim_that_does_not_divide_is_said_too():
    plan = mp.plan(lambda x, up: x @ up, jax.ShapeDtypeStruct((6, 32), jnp.float32), UP, mesh="data=4", layout="batch?: data",
                   dims={"x": "batch embed", "up": "embed mlp"})  # fmt: skip
    (found,) = redundant_matmuls(plan)
    assert (found.axes, found.times, found.share) == (("data",), 4, 0.75)
    assert "`batch?: data` does not divide `batch` of 6: make it a multiple of 4" in str(found)


def product(x, up):
    return jnp.tanh(x @ up)


LARGE = {"x": jnp.ones((2048, 1024)), "up": jnp.ones((1024, 1024))}


def first_call(layout, times=1):
    dims = {"x": "rows embed", "up": "embed mlp"}
    run = mp.jit(product, mesh=mp.mesh("data=2, model=2"), layout=layout, dims=dims)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(times):
            jax.block_until_ready(run(**LARGE))
    return [w for w in said if w.category is mp.errors.RepeatedWarning]


def test_the_first_call_warns_of_products_that_every_device_does():
    """An axis that the layout asks for, and a large product that has nothing of it."""
    (said,) = first_call("columns?: data; mlp: model", times=2)
    assert said.filename == __file__
    text = str(said.message)
    assert "every device along `data` computes all of it" in text
    assert "test_redundant.py" in text
    assert "2 × the FLOPs needed" in text
    assert "a rule for one of `rows embed mlp` over `data` splits it" in text


@pytest.mark.parametrize("layout", ["rows: data; mlp: model", "rows: data", "mlp: model"])
def test_no_warning_where_no_axis_is_asked_for_in_vain(layout):
    assert first_call(layout) == []
