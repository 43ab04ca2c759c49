"""Types of the functions that ``mp.jit`` and related functions return; checked by pyright, and run as a test."""

import inspect
from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.verify.check import Report

DIMS = {"x": "batch _"}


def scaled(x: jax.Array, by: float) -> jax.Array:
    """Times a number."""
    return x * by


def test_a_step_has_the_types_of_its_function(mesh: jax.sharding.Mesh) -> None:
    step = mp.jit(scaled, mesh=mesh, layout="batch: data", dims=DIMS)
    x = jnp.ones((8, 4))
    assert_type(step(x, 2.0), jax.Array)
    assert_type(step(x, by=2.0), jax.Array)
    with pytest.raises(TypeError):
        step(x, times=2.0)  # pyright: ignore[reportCallIssue]
    assert_type(step.plan(x, 2.0), mp.Plan)
    assert_type(mp.check(scaled, x, 2.0, layout="batch: data", mesh=mesh, dims=DIMS), Report)
    assert inspect.signature(step) == inspect.signature(scaled)
    assert step.__doc__ == "Times a number."


def test_as_a_decorator_too(mesh: jax.sharding.Mesh) -> None:
    @mp.jit(mesh=mesh, layout="batch: data", dims=DIMS)
    def decorated(x: jax.Array, by: float) -> jax.Array:
        return x * by

    assert_type(decorated(jnp.ones((8, 4)), by=2.0), jax.Array)
    assert (decorated(jnp.ones((8, 4)), 2.0) == 2).all()
    assert (inspect.unwrap(decorated).__name__, inspect.unwrap(decorated)(jnp.float32(1), 2.0)) == ("decorated", 2)


class Scaler(NamedTuple):
    by: jax.Array

    @mp.jit(mesh="data=4, model=2", layout="batch: data", dims=DIMS)
    def scaled(self, x: jax.Array) -> jax.Array:
        return x * self.by


def test_a_method_has_the_types_of_what_is_left_of_its_arguments() -> None:
    scaler, x = Scaler(jnp.float32(2)), jnp.ones((8, 4))
    assert_type(scaler.scaled(x), jax.Array)
    assert_type(Scaler.scaled(scaler, x), jax.Array)
    with pytest.raises(TypeError):
        scaler.scaled(scaler, x)  # pyright: ignore[reportCallIssue]


def test_what_init_returns_is_what_create_returns(mesh: jax.sharding.Mesh) -> None:
    def create(size: int) -> dict[str, jax.Array]:
        return {"w": jnp.ones((8, 4))}

    init = mp.init(create, mesh=mesh, layout="", dims={"w": "_ _"})
    assert_type(init(3), dict[str, jax.Array])
