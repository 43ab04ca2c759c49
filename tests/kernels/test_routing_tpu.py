"""The TPU kernels of routing in the TPU interpreter, with race detection, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import race_detection
from kernel_cases import ROUTERS, make, odd_logits

from meshpar_kernels import combine, permute
from meshpar_kernels.routing import reference, tpu_gather

RNG = np.random.default_rng(1)


@pytest.mark.parametrize(("name", "tokens", "experts"), [("deepseek-v3", 130, 16), ("deepseek-v2", 40, 128)])
def test_route(name, tokens, experts):
    options = dict(ROUTERS[name])
    if "bias" in options:
        options["bias"] = RNG.normal(size=experts)
    logits = odd_logits(tokens, experts)
    want = make(logits, implementation="reference", **options)
    with race_detection():
        got = jax.block_until_ready(make(logits, implementation="pallas", **options))
    for name in ("expert", "counts", "rank", "offsets", "dropped"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.weight, want.weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "rows", "width", "k", "mode"), [(jnp.bfloat16, 21, 128, 2, "eager"), (jnp.float32, 18, 256, 1, "on_wait")]
)
def test_gather_sum(dtype, rows, width, k, mode):
    x = jnp.asarray(RNG.normal(size=(rows, width)), dtype).at[3].set(jnp.nan)
    index = RNG.integers(-1, rows, size=(20, k))
    index = jnp.asarray(np.where(index == 3, rows + 5, index), jnp.int32)
    weight = jnp.asarray(RNG.normal(size=(20, k)), jnp.float32) if k > 1 else None
    want = reference.gather_sum(x, index, weight)
    with race_detection(dma_execution_mode=mode):
        got = jax.block_until_ready(tpu_gather.gather_sum(x, index, weight, block=16 * k))
    assert got.dtype == dtype
    assert np.isfinite(want.astype(jnp.float32)).all()
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-2 if k > 1 else 0, atol=1e-6)


def test_gradients_use_the_kernel():
    plan = make(RNG.normal(size=(16, 4)).astype(np.float32), 2)
    x = jnp.asarray(RNG.normal(size=(16, 128)), jnp.float32)

    def loss(x, weight, implementation):
        y = permute(x, plan, implementation=implementation)
        return (combine(y, plan, weight=weight, implementation=implementation) ** 2).sum()

    grad = jax.make_jaxpr(jax.grad(loss, (0, 1)), static_argnums=2)
    text = str(grad(x, plan.weight, "pallas_tpu"))
    assert text.count("name=meshpar_gather_sum") == 4  # two forward, two backward


def test_a_missing_wait_is_flagged(monkeypatch):
    """The race detector sees what could go wrong here: summing rows before they arrive."""
    copy = tpu_gather.pltpu.make_async_copy

    class NoWait:
        def __init__(self, *args):
            self.copy = copy(*args)

        def start(self):
            self.copy.start()

        def wait(self):
            pass

    monkeypatch.setattr(tpu_gather.pltpu, "make_async_copy", NoWait)
    x = jnp.ones((16, 128), jnp.float32)
    index = jnp.zeros((16, 1), jnp.int32)
    with (
        pytest.raises(RuntimeError, match="found a race between two memory accesses"),
        race_detection(dma_execution_mode="eager"),
    ):
        jax.block_until_ready(tpu_gather.gather_sum(x, index, None))
