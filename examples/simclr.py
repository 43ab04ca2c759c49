"""SimCLR with a ResNet-50, at its real size: a contrastive loss over the global batch, whatever the layout.

    meshpar plan examples/simclr.py:simclr --topology v5e:8x8

The rows 2i and 2i + 1 of a batch are two views of one image. Each view is compared with every other view of the batch, so a
sharded batch is all-gathered once: 128 features of each view, not its images. Source: Chen et al., "A Simple Framework for
Contrastive Learning of Visual Representations" (2020).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import resnet
from resnet import LAYOUTS, Target

__all__ = ["LAYOUTS", "nt_xent", "simclr"]

TEMPERATURE = 0.1


def simclr(
    batch: int = 8192, size: int = 224, width: int = 64, projection: int = 128, dtype: Any = jnp.bfloat16
) -> Target:
    """SimCLR: 23.5e6 weights of a ResNet-50, 4.5e6 of the projection head; 4,096 images in a step; LARS.

    Args:
      batch: views in a step, two of each image.
      projection: features that the loss compares.
      dtype: the compute dtype, also of the images.
    """
    images = jax.ShapeDtypeStruct((batch, size, size, 3), dtype)
    optimizer = optax.lars(4.8, weight_decay=1e-6, momentum=0.9)
    return resnet.target(SimClr(width, projection, dtype), nt_xent, optimizer, images)


def nt_xent(z: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of the paper's equation 1, NT-Xent, of the projections `z` [batch, projection], float32.

    `labels` [batch] are equal for the two views of an image. The loss of a view is the cross-entropy of the other view among
    all views but itself.
    """
    z /= jnp.linalg.norm(z, axis=-1, keepdims=True)
    similar = z @ z.T / TEMPERATURE
    row, column = jnp.arange(len(z))[:, None], jnp.arange(len(z))
    similar = jnp.where(row == column, -jnp.inf, similar)
    other = jnp.where((labels[:, None] == labels) & (row != column), similar, 0).sum(-1)
    return (jax.nn.logsumexp(similar, axis=-1) - other).mean()


class SimClr(nn.Module):
    width: int
    projection: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """The projections [batch, projection], float32, of images [batch, height, width, 3]."""
        x = resnet.features(self.dtype, self.width, images).mean((1, 2)).astype(jnp.float32)
        first = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("features", "hidden"))
        second = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("hidden", "projection"))
        x = nn.relu(nn.Dense(x.shape[-1], use_bias=False, kernel_init=first, name="head")(x))
        return nn.Dense(self.projection, use_bias=False, kernel_init=second, name="projection")(x)
