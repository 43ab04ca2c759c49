"""Semantic segmentation of images of Cityscapes' size, whose height is sharded: the convolutions of neighbours exchange halos.

    meshpar plan examples/segmentation.py:cityscapes --topology v5e:8x8 --mesh "data=16, model=4" --layout data+height

A fully convolutional network: a ResNet-50 whose last two stages are dilated instead of strided, so that its features have
an eighth of the rows and columns of the images, a head, an auxiliary head for the loss, and bilinear upsampling. An image
of 1024x2048 pixels is too large for many images on a device; `height: model` splits each over several. Sources: Long et
al., "Fully Convolutional Networks for Semantic Segmentation" (2015); Yu et al., "Dilated Residual Networks" (2017); Zhao et
al., "Pyramid Scene Parsing Network" (2017) for the auxiliary loss; Cordts et al., "The Cityscapes Dataset" (2016).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import resnet
from resnet import Target, conv, norm

LAYOUTS = {
    "data": "batch: data",
    "height": "height: data",
    "data+height": "batch: data; height: model",
}
DIMS = {"batch/images": "batch height width _", "batch/labels": "batch height width", "state/stats/*": "features"}
STRIDE = 8
"""Rows of the image for each row of the features."""


def cityscapes(
    batch: int = 16,
    height: int = 1024,
    width: int = 2048,
    features: int = 64,
    classes: int = 19,
    dtype: Any = jnp.bfloat16,
) -> Target:
    """A dilated ResNet-50 with two heads: 35.3e6 weights, images of 1024x2048, 19 classes; momentum 0.9.

    Args:
      features: of the first stage.
      dtype: the compute dtype, also of the images.
    """
    images = jax.ShapeDtypeStruct((batch, height, width, 3), dtype)
    model = Segmentation(features, classes, dtype)
    return resnet.target(model, loss_of, optax.sgd(0.01, momentum=0.9), images, (height, width), DIMS)


def loss_of(logits: tuple[jax.Array, jax.Array], labels: jax.Array) -> jax.Array:
    """The mean loss of a pixel by both heads' logits [batch, height, width, classes]; `labels` [batch, height, width]."""
    main, auxiliary = (resnet.cross_entropy(x, labels) for x in logits)
    return main + 0.4 * auxiliary


class Segmentation(nn.Module):
    features: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits of the head and of the auxiliary head, float32 [batch, height, width, classes]."""
        d = self.dtype
        x = resnet.stem(d, self.features, images)
        outputs, dilation = [], 1
        for i, blocks in enumerate(resnet.STAGES):
            for j in range(blocks):
                stride = 2 if i == 1 and j == 0 else 1
                x = resnet.Bottleneck(self.features * 2**i, stride, d, dilation, name=f"stage{i}_block{j}")(x)
                dilation = max(1, 2 ** (i - 1))  # the first block of a stage has the dilation of the stage before
            outputs.append(x)
        return Head(self.classes, d, name="head")(outputs[-1]), Head(self.classes, d, name="auxiliary")(outputs[-2])


class Head(nn.Module):
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, height, width, classes] of features [batch, height / 8, width / 8, features]."""
        x = nn.relu(norm(self.dtype, name="norm")(conv(self.dtype, x.shape[-1] // 4, 3, name="conv")(x)))
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), (None, None, "features", "classes"))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("classes",))
        x = nn.Conv(self.classes, (1, 1), dtype=self.dtype, kernel_init=init, bias_init=bias, name="logits")(x)
        return upsampled(x.astype(jnp.float32))


def upsampled(x: jax.Array) -> jax.Array:
    """`x` [batch, height, width, classes] at eight times the rows and columns, by bilinear interpolation.

    A transposed convolution with fixed weights, as in the paper, so that a sharded height needs one row of its neighbours.
    """
    near = 1 - np.abs(np.arange(2 * STRIDE) - STRIDE + 0.5) / STRIDE
    kernel = jnp.asarray(np.outer(near, near)[:, :, None, None], x.dtype) * jnp.ones((1, 1, 1, x.shape[-1]), x.dtype)
    half = 3 * STRIDE // 2
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), [(half - 1, half - 1 + STRIDE % 2)] * 2, lhs_dilation=(STRIDE, STRIDE),
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1],
    )  # fmt: skip
