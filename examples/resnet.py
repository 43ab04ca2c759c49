"""ResNet-50 in Flax Linen, at its real size, to be planned and compiled for slices that are not attached.

    meshpar plan examples/resnet.py:resnet50 --topology v5e:4x4 --mesh "data=4, model=4" --layout data+height

Batch norms have the statistics of the global batch under every layout. `height: model` shards the images by height: convolutions
exchange halos.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

DATA = "batch: data"
LAYOUTS = {
    "data": DATA,
    "fsdp": f"{DATA}; features: data",
    "features": f"{DATA}; features, classes: model",
    "data+height": f"{DATA}; height: model",
}
DIMS = {
    "batch/images": "batch height width _",
    "batch/labels": "batch",
    "state/stats/*": "features",
}
STAGES = (3, 4, 6, 3)  # blocks of each stage

Target = tuple[Any, tuple[Any, ...], dict[str, str]]
"""(train step, its arguments as ``jax.ShapeDtypeStruct``, the dims of its batch and statistics)."""


def resnet50(
    batch: int = 1024, size: int = 224, width: int = 64, classes: int = 1000, dtype: Any = jnp.bfloat16
) -> Target:
    """ResNet-50, version 1.5: 25.6e6 weights; float32 weights, momentum 0.9.

    Args:
      batch: images in a step.
      size: of a side of an image, in pixels.
      width: channels of the first stage.
      dtype: the compute dtype, also of the images.
    """
    images = jax.ShapeDtypeStruct((batch, size, size, 3), dtype)
    return target(ResNet(width, classes, dtype), cross_entropy, optax.sgd(0.1, momentum=0.9), images)


def target(
    model: nn.Module,
    loss_of: Callable[[Any, jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
    images: jax.ShapeDtypeStruct,
    labels: tuple[int, ...] = (),
    dims: Mapping[str, str] = MappingProxyType(DIMS),
) -> Target:
    """The train step of a model with batch norms, with its arguments: (step, (state, batch), dims).

    Args:
      model: from images [batch, height, width, 3] to its outputs.
      loss_of: outputs and labels → mean loss in nats.
      images, labels: shape of the images, and shape of the labels of one image.
    """
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, *images.shape[1:]), images.dtype)))
    state = {
        "params": variables["params"],
        "stats": variables["batch_stats"],
        "opt": jax.eval_shape(optimizer.init, variables["params"]),
    }
    data = {"images": images, "labels": jax.ShapeDtypeStruct((images.shape[0], *labels), jnp.int32)}

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        """One update; returns the new state and the mean loss in nats."""

        def loss(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state["stats"]}
            outputs, new = model.apply(variables, batch["images"], mutable=["batch_stats"])
            return loss_of(outputs, batch["labels"]), new["batch_stats"]

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "stats": stats, "opt": opt}, value

    return step, (state, data), dict(dims)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of `labels` [...] by `logits` [..., classes]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class ResNet(nn.Module):
    width: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes], float32, of images [batch, height, width, 3]."""
        return classifier(self.classes)(features(self.dtype, self.width, images).mean((1, 2)).astype(jnp.float32))


def features(dtype: Any, width: int, images: jax.Array) -> jax.Array:
    """The output of the last stage, in the module that calls it: [batch, height / 32, width / 32, features]."""
    x = stem(dtype, width, images)
    for i, blocks in enumerate(STAGES):
        for j in range(blocks):
            x = Bottleneck(width * 2**i, 2 if i > 0 and j == 0 else 1, dtype, name=f"stage{i}_block{j}")(x)
    return x


def stem(dtype: Any, width: int, images: jax.Array) -> jax.Array:
    """The layers before the first stage, in the module that calls it: a quarter of the rows and columns of the images."""
    x = nn.relu(norm(dtype, name="stem_norm")(conv(dtype, width, 7, 2, name="stem")(images)))
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")


def classifier(classes: int) -> nn.Dense:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("features", "classes"))
    bias = nn.with_logical_partitioning(nn.initializers.zeros, ("classes",))
    return nn.Dense(classes, kernel_init=init, bias_init=bias, name="head")


class Bottleneck(nn.Module):
    width: int
    stride: int
    dtype: Any
    dilation: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = self.dtype
        y = nn.relu(norm(d, name="norm1")(conv(d, self.width, 1, name="conv1")(x)))
        y = nn.relu(norm(d, name="norm2")(conv(d, self.width, 3, self.stride, name="conv2", dilation=self.dilation)(y)))
        y = norm(d, name="norm3", scale=nn.initializers.zeros)(conv(d, 4 * self.width, 1, name="conv3")(y))
        if x.shape != y.shape:
            x = norm(d, name="shortcut_norm")(conv(d, 4 * self.width, 1, self.stride, name="shortcut")(x))
        return nn.relu(x + y)


def conv(
    dtype: Any,
    features: int,
    size: int | tuple[int, int],
    stride: int = 1,
    *,
    name: str,
    groups: int = 1,
    dilation: int = 1,
) -> nn.Conv:
    init = nn.with_logical_partitioning(nn.initializers.he_normal(), (None, None, None, "features"))
    return nn.Conv(
        features, (size, size) if isinstance(size, int) else size, (stride, stride), kernel_dilation=dilation,
        feature_group_count=groups, use_bias=False, dtype=dtype, kernel_init=init, name=name,
    )  # fmt: skip


def norm(dtype: Any, *, name: str, scale: Any = nn.initializers.ones) -> nn.BatchNorm:
    named = functools.partial(nn.with_logical_partitioning, names=("features",))
    return nn.BatchNorm(
        use_running_average=False, momentum=0.9, dtype=dtype, scale_init=named(scale),
        bias_init=named(nn.initializers.zeros), name=name,
    )  # fmt: skip
