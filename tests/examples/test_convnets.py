"""EfficientNet-B7 and AmoebaNet-D of the examples: published sizes, an operation against NumPy, equal runs under two layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import count_weights, drawn
from lowered import same

import convnets


def test_efficientnet_b7_has_the_published_size():
    total = 3 * 3 * 3 * 64 + 2 * 64  # stem
    before = 64
    widths, layers = (32, 48, 80, 160, 224, 384, 640), (4, 7, 7, 10, 10, 13, 4)
    for (expansion, _, _, _, size), features, repeats in zip(convnets.BLOCKS, widths, layers, strict=True):
        for _ in range(repeats):
            wide = before * expansion
            total += (before * wide + 2 * wide) * (expansion > 1) + size * size * wide + 2 * wide
            squeezed = before // 4
            total += (wide + 1) * squeezed + (squeezed + 1) * wide + wide * features + 2 * features
            before = features
    total += before * 2560 + 2 * 2560 + 2561 * 1000
    assert count_weights(convnets.efficientnet_b7()) == total == 66_347_960  # 66M in table 2 of the paper


def test_amoebanet_has_the_published_size():
    """That of table 1 of GPipe's paper."""
    assert count_weights(convnets.amoebanet_d(layers=18, filters=208)) == pytest.approx(82e6, rel=0.025)


@pytest.mark.slow
def test_no_layout_changes_a_number(monkeypatch):
    monkeypatch.setattr(convnets, "BLOCKS", ((2, 16, 1, 2, 5),))
    step, shapes, dims = convnets.efficientnet_b7(8, 32, classes=8, dtype=jnp.float32, width=0.5, depth=1.0)
    check(step, drawn(shapes, 8), dims, "shard_map")


@pytest.mark.slow
def test_no_layout_changes_a_number_of_a_cell():
    """A cell of AmoebaNet-D after another one, with its gradients: XLA takes minutes for the network."""
    cell = convnets.Cell(8, False, False, jnp.float32)
    images = np.random.default_rng(0).normal(size=(2, 8, 16, 16, 8)).astype(np.float32)
    variables = cell.init(jax.random.key(0), tuple(images))

    def step(params, images):
        def loss(params):
            (_, out), _ = cell.apply({**variables, "params": params}, tuple(images), mutable=["batch_stats"])[0]
            return (jnp.sin(out) ** 2).mean()

        return jax.value_and_grad(loss)(params)

    check(step, (variables["params"], images), {"images": "_ batch height width _"}, "jit")


def check(step, args, dims, lowering):
    how = {"meshes": ["data=4, model=2"], "lowerings": (lowering,), "tolerance": 1e-3}
    same(step, *args, layout=convnets.LAYOUTS["data+height"], dims=dims, **how)
