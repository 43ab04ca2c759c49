"""One slice, its devices in one order, cut into axes in several ways: the same FSDP sends, holds and takes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import bf16

import meshpar as mp
from meshpar._src.hardware import topology as slices

CUTS = [(256,), (2, 128), (16, 16), (32, 8), (2, 8, 2, 8)]
"""Of 256 devices in rows of 16: the first axes are the major ones."""


@pytest.fixture
def in_rows(monkeypatch):
    """Axes are laid over the slice in the order of the devices' numbers, whatever their sizes."""

    def mesh(sizes, devices, slices, text):
        return np.array(devices, object).reshape(sizes)

    monkeypatch.setattr(slices, "device_mesh", mesh)


def step(w, x):
    def loss(w):
        h = x
        for up, down in zip(w["up"], w["down"], strict=True):
            h = h + jax.nn.relu(h @ up) @ down
        return (h.astype(jnp.float32) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.01 * g, w, jax.grad(loss)(w))


def fsdp(cut, embed=4096, mlp=14336, rows=256 * 4096, **how):
    axes = [f"a{k}" for k in range(len(cut))]
    w = {"up": [bf16(embed, mlp)] * 2, "down": [bf16(mlp, embed)] * 2}
    over = "+".join(axes)
    return mp.plan(
        step, w, bf16(rows, embed), mesh=", ".join(f"{a}={n}" for a, n in zip(axes, cut, strict=True)),
        topology="v5e:16x16", layout=f"batch: {over}; embed: {over}", lowering="shard_map", donate_argnums=0,
        dims={"x": "batch embed", "w/up/*": "embed mlp", "w/down/*": "mlp embed"}, **how,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", ["auto", "ring", "off"])
def test_physically_equal_meshes_give_equal_plans(in_rows, overlap):
    first = fsdp(CUTS[0], overlap=overlap)
    assert first.bytes_sent > 0
    for cut in CUTS[1:]:
        plan = fsdp(cut, overlap=overlap)
        assert plan.bytes_sent == pytest.approx(first.bytes_sent, rel=1e-9), cut
        assert plan.seconds == pytest.approx(first.seconds, rel=1e-9), cut
        assert plan.memory.peak == pytest.approx(first.memory.peak, rel=1e-9), cut
        assert [o.choice for o in plan.overlaps] == [o.choice for o in first.overlaps], cut
