"""EfficientNet-B7 and AmoebaNet-D in Flax Linen, at their real sizes, to be planned and compiled for slices that are not
attached.

    meshpar plan examples/convnets.py:efficientnet_b7 --topology v5e:8x8 --mesh "data=64" --layout data
    meshpar plan examples/convnets.py:amoebanet_d --topology v5e:8x8 --mesh "data=64" --layout data --set "layers=36, filters=544"

Batch norms have the statistics of the global batch under every layout. Sources: Tan & Le, "EfficientNet" (2019), without
its dropout; Real et al., "Regularized Evolution for Image Classifier Architecture Search" (2018) and Huang et al., "GPipe"
(2019), whose sizes of AmoebaNet-D these are.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import resnet
from resnet import Target, conv, norm

LAYOUTS = {**resnet.LAYOUTS, "data+features": "batch: data+model; features: model"}
DIMS = {"state/stats/*_stack/*": "layers features", **resnet.DIMS}

BLOCKS = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
)  # fmt: skip
"""(expansion, features, layers, stride, size of the kernel) of the stages of EfficientNet-B0."""

NORMAL = (
    (1, "conv1"), (1, "max3"), (1, "skip"), (0, "conv7"), (0, "conv1"), (0, "conv7"), (2, "max3"), (2, "skip"),
    (1, "mean3"), (5, "conv1"),
)  # fmt: skip
REDUCTION = (
    (0, "max2"), (0, "max3"), (2, "skip"), (1, "conv3"), (2, "conv7"), (2, "max3"), (3, "skip"), (1, "max2"),
    (2, "mean3"), (3, "conv1"),
)  # fmt: skip
"""(index of its input, operation) of each node of a cell of AmoebaNet-D; every two nodes are added to a new input."""
NORMAL_OUT, REDUCTION_OUT = (0, 3, 4, 6), (4, 5, 6)  # as in the authors' code, and in the counts of GPipe's paper


def efficientnet_b7(
    batch: int = 2048,
    size: int = 600,
    width: float = 2.0,
    depth: float = 3.1,
    classes: int = 1000,
    dtype: Any = jnp.bfloat16,
) -> Target:
    """EfficientNet-B7: 66.3e6 weights, images of 600x600; float32 weights, RMSProp.

    Args:
      width, depth: multiples of the features and layers of EfficientNet-B0.
      dtype: the compute dtype, also of the images.
    """
    images = jax.ShapeDtypeStruct((batch, size, size, 3), dtype)
    optimizer = optax.rmsprop(0.256, decay=0.9, momentum=0.9, eps=1e-3)
    return resnet.target(EfficientNet(width, depth, classes, dtype), resnet.cross_entropy, optimizer, images, dims=DIMS)


def amoebanet_d(
    batch: int = 1024,
    size: int = 224,
    layers: int = 18,
    filters: int = 256,
    classes: int = 1000,
    dtype: Any = jnp.bfloat16,
) -> Target:
    """AmoebaNet-D (18, 256): 122e6 weights; `layers=36, filters=544` has 1.06e9. Float32 weights, momentum 0.9.

    Args:
      layers: normal cells, a multiple of 3.
      filters: four times the features of the stem.
      dtype: the compute dtype, also of the images.
    """
    images = jax.ShapeDtypeStruct((batch, size, size, 3), dtype)
    model = AmoebaNet(layers, filters, classes, dtype)
    dims = DIMS if layers > 6 else resnet.DIMS  # fewer cells have no stack
    return resnet.target(model, resnet.cross_entropy, optax.sgd(0.1, momentum=0.9), images, dims=dims)


class EfficientNet(nn.Module):
    width: float
    depth: float
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes], float32, of images [batch, height, width, 3]."""
        d = self.dtype
        x = nn.silu(norm(d, name="stem_norm")(conv(d, self.features(32), 3, 2, name="stem")(images)))
        for i, (expansion, features, layers, stride, size) in enumerate(BLOCKS):
            x, _ = nn.remat(MBConv)(self.features(features), expansion, stride, size, d, name=f"stage{i}")(x)
            equal = stack(nn.remat(MBConv, prevent_cse=False), math.ceil(self.depth * layers) - 1)
            x, _ = equal(self.features(features), expansion, 1, size, d, name=f"stage{i}_stack")(x)
        x = nn.silu(norm(d, name="last_norm")(conv(d, self.features(1280), 1, name="last")(x)))
        return resnet.classifier(self.classes)(x.mean((1, 2)).astype(jnp.float32))

    def features(self, features: int) -> int:
        """The features of a layer that has ``features`` in EfficientNet-B0: the nearest multiple of 8, at least 90 %."""
        wanted = self.width * features
        near = max(8, int(wanted + 4) // 8 * 8)
        return near if near >= 0.9 * wanted else near + 8


def stack(layer: type[nn.Module], length: int) -> Callable[..., nn.Module]:
    """Equal layers as one scan, with their weights and statistics stacked along a dim `layers`."""
    axes: Any = {"params": 0, "batch_stats": 0}
    return nn.scan(
        layer, variable_axes=axes, split_rngs={"params": True}, length=length, metadata_params={nn.PARTITION_NAME: "layers"}
    )  # fmt: skip


class MBConv(nn.Module):
    """An inverted bottleneck: a wider 1x1 convolution, a depthwise convolution, weights of the features, a 1x1 convolution."""

    features: int
    expansion: int
    stride: int
    size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        d, before = self.dtype, x.shape[-1]
        wide, y = before * self.expansion, x
        if self.expansion > 1:
            y = nn.silu(norm(d, name="norm1")(conv(d, wide, 1, name="expand")(y)))
        y = nn.silu(norm(d, name="norm2")(conv(d, wide, self.size, self.stride, name="depthwise", groups=wide)(y)))
        weight = nn.silu(dense(d, before // 4, name="squeeze")(y.mean((1, 2), keepdims=True)))
        y = y * nn.sigmoid(dense(d, wide, name="excite")(weight))
        y = norm(d, name="norm3")(conv(d, self.features, 1, name="project")(y))
        return x + y if x.shape == y.shape else y, None


class AmoebaNet(nn.Module):
    layers: int
    filters: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes], float32, of images [batch, height, width, 3]."""
        features = self.filters // 4
        x = norm(self.dtype, name="stem_norm")(conv(self.dtype, features, 3, 2, name="stem")(images))
        state, _ = Cell(2 * features, True, False, self.dtype, name="stem_cell")((x, x))
        for i in range(3):
            features *= 2
            state, _ = Cell(2 * features, True, i == 0, self.dtype, name=f"reduction{i}")(state)
            for j in range(min(2, self.layers // 3)):
                state, _ = Cell(2 * features, False, j == 0, self.dtype, name=f"normal{i}_{j}")(state)
            if self.layers > 6:
                cells = stack(Cell, self.layers // 3 - 2)(
                    2 * features, False, False, self.dtype, name=f"normal{i}_stack"
                )
                state, _ = cells(state)
        x = state[1]
        return resnet.classifier(self.classes)(x.mean((1, 2)).astype(jnp.float32))


class Cell(nn.Module):
    """A cell of AmoebaNet-D: ten operations on the outputs of the two cells before.

    Attributes:
      reduction: it halves height and width; reduced: the cell before did.
    """

    features: int
    reduction: bool
    reduced: bool
    dtype: Any

    @nn.compact
    def __call__(self, state: tuple[jax.Array, jax.Array], _: None = None) -> tuple[tuple[jax.Array, jax.Array], None]:
        d, nodes, (before, last) = self.dtype, REDUCTION if self.reduction else NORMAL, state
        x = ReluConv(d, self.features, 1, name="input")(last)
        if self.reduced:
            before = Halved(self.features, d, name="before")(before)
        elif before.shape[-1] != self.features:
            before = ReluConv(d, self.features, 1, name="before")(before)
        states = [x, before]
        for i, (one, other) in enumerate(zip(nodes[::2], nodes[1::2], strict=True)):
            pair = [
                operation(d, name, 1 + (self.reduction and of < 2), f"node{i}_{k}_{name}", states[of])
                for k, (of, name) in enumerate((one, other))
            ]
            states.append(pair[0] + pair[1])
        out = jnp.concatenate([states[i] for i in (REDUCTION_OUT if self.reduction else NORMAL_OUT)], axis=-1)
        return (last, out), None


def operation(dtype: Any, kind: str, stride: int, name: str, x: jax.Array) -> jax.Array:
    """A node of a cell, in the module that calls it: `x` [batch, height, width, features] with the same features."""
    size, steps = (2 if kind == "max2" else 3,) * 2, (stride, stride)
    if kind == "skip":
        return x
    if kind.startswith("max"):
        return nn.max_pool(x, size, steps, "SAME")
    if kind == "mean3":
        return nn.avg_pool(x, size, steps, "SAME", count_include_pad=False)
    if kind == "conv1":
        return ReluConv(dtype, x.shape[-1], 1, stride, name=name)(x)
    return Narrow(((3, 3),) if kind == "conv3" else ((1, 7), (7, 1)), stride, dtype, name=name)(x)


class Narrow(nn.Module):
    """Convolutions of a quarter of the features, between two 1x1 convolutions."""

    sizes: tuple[tuple[int, int], ...]
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d, features = self.dtype, x.shape[-1]
        y = ReluConv(d, features // 4, 1, name="narrow")(x)
        for i, size in enumerate(self.sizes):
            y = ReluConv(d, features // 4, size, self.stride if i == 0 else 1, name=f"conv{i}")(y)
        return ReluConv(d, features, 1, name="widen")(y)


class Halved(nn.Module):
    """`x` at half of its height and width: half of the features from the even pixels, half from the odd ones."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d, x = self.dtype, nn.relu(x)
        odd = jnp.pad(x[:, 1:, 1:], ((0, 0), (0, 1), (0, 1), (0, 0)))
        even = conv(d, self.features // 2, 1, 2, name="even")(x)
        return norm(d, name="norm")(
            jnp.concatenate([even, conv(d, self.features // 2, 1, 2, name="odd")(odd)], axis=-1)
        )


class ReluConv(nn.Module):
    """ReLU, convolution, batch norm."""

    dtype: Any
    features: int
    size: int | tuple[int, int]
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = conv(self.dtype, self.features, self.size, self.stride, name="conv")(nn.relu(x))
        return norm(self.dtype, name="norm")(y)


def dense(dtype: Any, features: int, *, name: str) -> nn.Dense:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), (None, "features"))
    bias = nn.with_logical_partitioning(nn.initializers.zeros, ("features",))
    return nn.Dense(features, dtype=dtype, kernel_init=init, bias_init=bias, name=name)
