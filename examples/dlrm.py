"""DLRM at the size of MLPerf's benchmark: 96 GB of embeddings, of which only the rows of a batch are sent.

    meshpar plan examples/dlrm.py:dlrm --topology v5e:4x4 --layout features

The 26 tables are one array, with the rows of one table after the rows of another. A step differentiates the rows that it
reads, and adds their gradients to the table: no gradient has the size of the table. Reading and writing at run-time indices
never gathers the table; each device serves its own rows. Sources: Naumov et al., "Deep Learning Recommendation Model for
Personalization and Recommendation Systems" (2019); the sizes are from the MLPerf training benchmark with Criteo's
Terabyte data set and at most 40e6 rows in a table.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import meshpar as mp

ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Rows of the tables."""
LAYOUTS = {
    "rows": "batch: data; rows: data",  # the table by rows, the matmuls by batch
    "features": "embed: data; batch: data",  # the table by features: every device reads its features of all rows
    "rows+mlp": "batch: data; rows: data+model; mlp: model",
}
DIMS = {
    "state/table": "rows embed",
    "batch/dense": "batch _",
    "batch/sparse": "batch tables",
    "batch/clicked": "batch",
}
RATE = 0.1

Target = tuple[Any, tuple[Any, ...], dict[str, str]]
"""(train step, its arguments as ``jax.ShapeDtypeStruct``, the dims of the table and the batch)."""


def dlrm(
    batch: int = 65536, rows: Sequence[int] = ROWS, embed: int = 128, bottom: Sequence[int] = (512, 256),
    top: Sequence[int] = (1024, 1024, 512, 256), dense: int = 13, multiple: int = 4096, dtype: Any = jnp.bfloat16,
) -> Target:  # fmt: skip
    """DLRM: 24.0e9 weights of embeddings, 2.4e6 of matmuls; float32 weights, SGD.

    Args:
      rows: of each table.
      bottom, top: widths of the hidden layers below and above the interaction.
      dense: number of dense features.
      multiple: the table is padded to a multiple of this, so that devices have equal numbers of rows.
      dtype: the compute dtype.
    """
    model = Dlrm(tuple(bottom), tuple(top), dtype)
    data = {
        "dense": jax.ShapeDtypeStruct((batch, dense), jnp.float32),
        "sparse": jax.ShapeDtypeStruct((batch, len(rows)), jnp.int32),
        "clicked": jax.ShapeDtypeStruct((batch,), jnp.float32),
    }
    found = jax.ShapeDtypeStruct((batch, len(rows), embed), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), found, data["dense"])["params"]
    table = jax.ShapeDtypeStruct((math.ceil(sum(rows) / multiple) * multiple, embed), jnp.float32)
    first = np.cumsum([0, *rows[:-1]])

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        """One update; returns the new state and the mean loss in nats. `batch["sparse"]`: a row of each table."""
        index = batch["sparse"] + jnp.asarray(first, jnp.int32)

        def loss_of(params: Any, found: jax.Array) -> jax.Array:
            logits = model.apply({"params": params}, found, batch["dense"])
            return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

        loss, (gradients, rows) = jax.value_and_grad(loss_of, argnums=(0, 1))(state["params"], state["table"][index])
        params = jax.tree.map(lambda w, g: w - RATE * g, state["params"], gradients)
        return {"params": params, "table": state["table"].at[index].add(-RATE * rows)}, loss

    return step, ({"params": params, "table": table}, data), DIMS


class Dlrm(nn.Module):
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, rows: jax.Array, dense: jax.Array) -> jax.Array:
        """Logits of a click, float32 [batch], by `rows` of the tables [batch, tables, embed] and `dense` [batch, features].

        The interaction: the dot products of all pairs of embeddings, of which the output of the lower matmuls is one.
        """
        x = Mlp((*self.bottom, rows.shape[-1]), self.dtype, name="bottom")(dense.astype(self.dtype))
        vectors = jnp.concatenate([x[:, None], rows.astype(self.dtype)], axis=1)
        dots = jnp.einsum("bie,bje->bij", vectors, vectors)
        i, j = np.tril_indices(vectors.shape[1], -1)
        x = mp.rename(x, embed="interaction")  # its size, 479, does not divide
        y = Mlp(self.top, self.dtype, name="top")(jnp.concatenate([x, dots[:, i, j]], axis=1))
        return nn.Dense(1, dtype=self.dtype, name="click")(y)[:, 0].astype(jnp.float32)


class Mlp(nn.Module):
    widths: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Layers with ReLU; every second one has the output dim `mlp`, and the next contracts it."""
        for i, width in enumerate(self.widths):
            dims = (None, "mlp") if i % 2 == 0 and i + 1 < len(self.widths) else ("mlp" if i % 2 else None, None)
            init = nn.with_logical_partitioning(nn.initializers.he_normal(), dims)
            bias = nn.with_logical_partitioning(nn.initializers.zeros, dims[1:])
            x = nn.relu(nn.Dense(width, dtype=self.dtype, kernel_init=init, bias_init=bias, name=f"layer{i}")(x))
        return x
