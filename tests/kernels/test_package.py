"""The package is independent of meshpar."""

import subprocess
import sys
from pathlib import Path

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
