"""ResNet-50 in Flax Linen, at its real size, to be planned and compiled for slices that are not attached.

    meshpar plan examples/resnet.py:resnet50 --topology v5e:4x4 --mesh "data=4, model=4" --layout data+height

Batch norms have the statistics of the global batch under every layout. `height: model` shards the images by height: convolutions
exchange halos.
"""

import functools
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
    model = ResNet(width, classes, dtype)
    image = jnp.zeros((1, 32, 32, 3), jnp.float32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), image))
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = {
        "params": variables["params"],
        "stats": variables["batch_stats"],
        "opt": jax.eval_shape(optimizer.init, variables["params"]),
    }
    data = {
        "images": jax.ShapeDtypeStruct((batch, size, size, 3), dtype),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }

    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        """One update; returns the new state and the mean loss in nats."""

        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state["stats"]}
            logits, new = model.apply(variables, batch["images"], mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), new["batch_stats"]

        (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "stats": stats, "opt": opt}, loss

    return step, (state, data), DIMS


class ResNet(nn.Module):
    width: int
    classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes], float32, of images [batch, height, width, 3]."""
        d = self.dtype
        x = conv(d, self.width, 7, 2, name="stem")(images)
        x = nn.relu(norm(d, name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, blocks in enumerate(STAGES):
            for j in range(blocks):
                x = Bottleneck(self.width * 2**i, 2 if i > 0 and j == 0 else 1, d, name=f"stage{i}_block{j}")(x)
        x = x.mean((1, 2)).astype(jnp.float32)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("features", "classes"))
        bias = nn.with_logical_partitioning(nn.initializers.zeros, ("classes",))
        return nn.Dense(self.classes, kernel_init=init, bias_init=bias, name="head")(x)


class Bottleneck(nn.Module):
    width: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        d = self.dtype
        y = nn.relu(norm(d, name="norm1")(conv(d, self.width, 1, name="conv1")(x)))
        y = nn.relu(norm(d, name="norm2")(conv(d, self.width, 3, self.stride, name="conv2")(y)))
        y = norm(d, name="norm3", scale=nn.initializers.zeros)(conv(d, 4 * self.width, 1, name="conv3")(y))
        if x.shape != y.shape:
            x = norm(d, name="shortcut_norm")(conv(d, 4 * self.width, 1, self.stride, name="shortcut")(x))
        return nn.relu(x + y)


def conv(dtype: Any, features: int, size: int, stride: int = 1, *, name: str) -> nn.Conv:
    init = nn.with_logical_partitioning(nn.initializers.he_normal(), (None, None, None, "features"))
    return nn.Conv(features, (size, size), (stride, stride), use_bias=False, dtype=dtype, kernel_init=init, name=name)


def norm(dtype: Any, *, name: str, scale: Any = nn.initializers.ones) -> nn.BatchNorm:
    named = functools.partial(nn.with_logical_partitioning, names=("features",))
    return nn.BatchNorm(
        use_running_average=False, momentum=0.9, dtype=dtype, scale_init=named(scale),
        bias_init=named(nn.initializers.zeros), name=name,
    )  # fmt: skip
