"""Train a convolutional classifier in Flax Linen on the scikit-learn digits, sharded by a layout.

    python examples/train_classifier.py          # under a minute on 8 virtual CPU devices
    python examples/train_classifier.py --layout "batch: data" --mesh "data=8"

The names come from Linen's logical metadata: the model is an ordinary Linen model.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from rich.console import Console

import meshpar as mp

LAYOUT = "batch: data; wide, hidden: model"
DIMS = {"images": "batch height width", "labels": "batch"}
BATCH = 64
TEST_IMAGES = 360


@dataclass(frozen=True)
class Result:
    losses: list[float]  # one a step
    accuracy: float  # on test images, 0 to 1


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array | np.ndarray) -> jax.Array:
        """Logits [batch, class] of images [batch, 8, 8]."""
        x = images[..., None]
        x = nn.relu(conv(32, ("kernel_height", "kernel_width", "gray", "narrow"))(x))
        x = nn.with_logical_constraint(x, ("batch", "height", "width", "narrow"))
        x = nn.relu(conv(64, ("kernel_height", "kernel_width", "narrow", "wide"))(x))
        x = nn.with_logical_constraint(x, ("batch", "height", "width", "wide"))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(dense(128, ("height", "width", "wide", "hidden"), axis=(-3, -2, -1))(x))
        x = nn.with_logical_constraint(x, ("batch", "hidden"))
        return dense(10, ("hidden", "class"))(x)


def conv(features: int, dims: tuple[str, ...]) -> nn.Conv:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), dims)
    bias = nn.with_logical_partitioning(nn.initializers.zeros, dims[-1:])
    return nn.Conv(features, (3, 3), kernel_init=init, bias_init=bias)


def dense(features: int, dims: tuple[str, ...], axis: int | tuple[int, ...] = -1) -> nn.DenseGeneral:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), dims)
    bias = nn.with_logical_partitioning(nn.initializers.zeros, dims[-1:])
    return nn.DenseGeneral(features, axis=axis, kernel_init=init, bias_init=bias)


def create_state(key: jax.Array) -> TrainState:
    model = ConvNet()
    params = model.init(key, np.zeros((1, 8, 8), np.float32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(2e-3))


def train_step(
    state: TrainState, images: jax.Array | np.ndarray, labels: jax.Array | np.ndarray
) -> tuple[TrainState, jax.Array]:
    def loss_of(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def count_right(state: TrainState, images: jax.Array | np.ndarray, labels: jax.Array | np.ndarray) -> jax.Array:
    return (state.apply_fn({"params": state.params}, images).argmax(-1) == labels).sum()


def main(argv: Sequence[str] | None = None) -> Result:
    args = parse(argv)
    mp.virtual_devices(8)  # concerns the CPU alone: GPUs and TPUs are used as they are
    mesh = mp.mesh(args.mesh or f"data=-1, model={2 if jax.device_count() % 2 == 0 else 1}")
    how = {"mesh": mesh, "layout": mp.Layout(args.layout)}
    step = mp.jit(train_step, dims=DIMS, lowering=args.lowering, donate_argnames="state", **how)
    test = mp.jit(count_right, dims=DIMS, lowering=args.lowering, **how)
    (images, labels), held_out = load_split(args.seed)

    state = mp.init(create_state, **how)(jax.random.key(args.seed))
    print(step.plan(state, images[:BATCH], labels[:BATCH]))

    console = Console(highlight=False)
    losses: list[float] = []
    accuracy = 0.0
    for epoch in range(1, args.epochs + 1):
        before = len(losses)
        for batch in shuffled_batches(images, labels, seed=args.seed + epoch):
            state, loss = step(state, *batch)
            losses.append(float(loss))
        accuracy = int(test(state, *held_out)) / TEST_IMAGES
        console.print(
            f"epoch {epoch}/{args.epochs}  loss {statistics.fmean(losses[before:]):.3f}  test accuracy {accuracy:.1%}"
        )
    return Result(losses, accuracy)


Split = tuple[np.ndarray, np.ndarray]


def load_split(seed: int) -> tuple[Split, Split]:
    """(images [n, 8, 8] from 0 to 1, labels [n]) to train on and to test."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = (digits.images / 16).astype(np.float32)[order]
    labels = digits.target.astype(np.int32)[order]
    train, test = slice(TEST_IMAGES, None), slice(TEST_IMAGES)
    return (images[train], labels[train]), (images[test], labels[test])


def shuffled_batches(images: np.ndarray, labels: np.ndarray, seed: int) -> Iterator[Split]:
    """Full batches in random order, without the remainder of the epoch."""
    order = np.random.default_rng(seed).permutation(len(labels))
    for start in range(0, len(labels) - BATCH + 1, BATCH):
        some = order[start : start + BATCH]
        yield images[some], labels[some]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", help='mesh axes and sizes (default "data=4, model=2" on 8 devices)')
    add("--layout", default=LAYOUT, help="rules that split the dims over the axes (%(default)s)")
    add("--lowering", choices=("auto", "jit", "shard_map"), default="auto")
    add("--epochs", type=int, default=8)
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except mp.errors.MeshparError as error:
        sys.exit(f"\n{error}")
