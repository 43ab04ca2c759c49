"""The steps of plans: in SSA form and in order, for every model, layout and way to overlap."""

import functools

import jax
import jax.numpy as jnp
import planned_transformer as model
import pytest
import small_transformer
from arrays import f32
from jax import lax
from test_golden import BY_NAME  # noqa: F401
from well_formed import assert_well_formed

import meshpar as mp
from meshpar.plan.steps import (
    Barrier,
    Body,
    Call,
    Constant,
    Loop,
    Reduce,
    Reshard,
    Run,
    Shard,
    free_shards,
    in_order,
    is_floating,
    readers_of,
    rewritten,
)
