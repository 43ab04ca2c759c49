"""Steps to a target loss: the training is SGD, the fit is exact on exact data, and MLPerf's checker accepts the log."""

import batch_sizes
import numpy as np
import pytest
from batch_sizes import Sweep

import meshpar as mp


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
