"""Steps to a target loss: the training is SGD, the fit is exact on exact data, and MLPerf's checker accepts the log."""

import batch_sizes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_sizes import Sweep

import meshpar as mp


def test_the_losses_are_those_of_sgd_in_float64():
    size, steps, rate = 32, 12, 0.125
    data, held_out = batch_sizes.digits()
    key = jax.random.key(3)
    losses = batch_sizes.losses_of(jnp.float32(rate), key, data, held_out, size, steps)

    create_key, data_key = jax.random.split(key)
    w = {k: np.asarray(x, np.float64) for k, x in batch_sizes.create(create_key)["params"].items()}
    momentum = {k: np.zeros_like(x) for k, x in w.items()}

    def forward(x, labels):
        hidden = np.maximum(x @ w["up"], 0)
        logits = hidden @ w["down"]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return hidden, p, -np.log(p[np.arange(len(labels)), labels]).mean()

    for n, batch_key in enumerate(jax.random.split(data_key, steps)):
        batch = batch_sizes.drawn(data, batch_key, size)
        x, labels = np.asarray(batch["images"], np.float64), np.asarray(batch["labels"])
        hidden, p, _ = forward(x, labels)
        d_logits = (p - np.eye(10)[labels]) / size
        g = {"down": hidden.T @ d_logits, "up": x.T @ (d_logits @ w["down"].T * (hidden > 0))}
        for k in w:
            momentum[k] = batch_sizes.MOMENTUM * momentum[k] + g[k]
            w[k] = w[k] - rate * momentum[k]
        expected = forward(np.asarray(held_out["images"], np.float64), np.asarray(held_out["labels"]))[2]
        np.testing.assert_allclose(losses[n], expected, rtol=2e-5)


def test_steps_to_a_target():
    losses = np.array([[3.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [1.0, 0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(batch_sizes.steps_to_target(losses, 1.0), [3, np.inf, 1])


def test_the_fit_is_exact_on_exact_data():
    sweeps = [Sweep(size, 20 * (1 + 50 / size), 0.1, 0.0) for size in (8, 64, 512)]
    np.testing.assert_allclose(batch_sizes.fitted(sweeps), (20, 50), rtol=1e-9)


def test_layouts_take_the_same_steps_and_mlperf_accepts_the_log(tmp_path):
    """With the name of a benchmark on MLPerf's list, of which the digits are not."""
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    found = batch_sizes.sweep(256, (0.0625, 0.125, 0.25, 0.5), seeds=2)
    log = tmp_path / "log.txt"
    steps, _ = batch_sizes.logged_training(found, mp.log.MlLog(log))
    assert steps == found.first

    def messages(text):
        (tmp_path / "checked.txt").write_text(text)
        checker = compliance.make_checker("training", "5.1.0", quiet=False, werror=True)
        checker.check_file(str(tmp_path / "checked.txt"), "training_5.1.0/common.yaml")
        return [*checker.overwritable.values(), *checker.not_overwritable]

    text = log.read_text().replace('"digits"', '"llama31_8b"')
    assert not messages(text)
    broken = "".join(x for x in text.splitlines(keepends=True) if '"init_stop"' not in x)
    assert messages(broken)
