"""The package is independent of meshpar, and refuses what it does not support."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshpar_kernels._choose import Unsupported, dispatch
from meshpar_kernels.shapes import MATMULS, MODELS

ROOT = Path(__file__).parents[2]


def test_it_imports_nothing_but_jax_and_numpy():
    """Nor does a matmul import tokamax, whose name it may be given."""
    program = (
        "import sys, meshpar_kernels as mk, jax.numpy as jnp\n"
        "mk.grouped_matmul(jnp.ones((8, 8)), jnp.ones((2, 8, 8)), jnp.array([3, 5]))\n"
        "print(sorted({'meshpar', 'flax', 'optax', 'rich', 'tokamax'} & {m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_dispatch_takes_what_is_asked_for():
    functions = {"pallas_tpu": Unsupported(["one", "two"]), "xla": lambda x: x + 1}
    assert dispatch("op", None, functions, "xla", 1) == 2
    assert dispatch("op", "xla", functions, "xla", 1) == 2
    for name in ("pallas", "pallas_tpu"):
        with pytest.raises(NotImplementedError, match=r"one\n.*two\n.*These can: xla"):
            dispatch("op", name, functions, "xla", 1)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        dispatch("op", "cuda", functions, "xla", 1)


def test_named_shapes_are_consistent():
    for name, shape in MATMULS.items():
        assert shape.m % shape.groups == 0, name
        assert shape.flops == 2 * shape.m * shape.k * shape.n
    for name, model in MODELS.items():
        assert model.experts % model.groups == 0, name
        assert model.top_groups * model.experts // model.groups >= model.k, name
    assert MATMULS["mixtral-8x7b-up"].n == MODELS["mixtral-8x7b"].mlp
    assert MATMULS["deepseek-v3-down"].n == MODELS["deepseek-v3"].embed
