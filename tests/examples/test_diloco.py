"""DiLoCo on two slices: losses fall, few bytes are sent between slices, and there is a picture."""

import diloco
import matplotlib.image
import pytest


@pytest.mark.slow
def test_the_losses_fall_with_a_few_exchanges(tmp_path):
    picture = tmp_path / "curves.png"
    flags = "--steps=24 --every=8 --layers=1 --embed=64 --seq=32".split()
    runs = diloco.main([*flags, "--picture", str(picture)])
    every_step, plain, streaming = runs.values()
    for run in runs.values():
        assert len(run.losses) == 24
        assert run.losses[-1] < 0.8 * run.losses[0]
        assert run.held_out < 0.8 * run.losses[0]
    assert plain.sent == pytest.approx(every_step.sent / 8, rel=0.02)
    assert streaming.sent == pytest.approx(plain.sent / 4, rel=0.15)  # codes, exponents and weights of replicas
    assert min(matplotlib.image.imread(picture).shape[:2]) > 500


@pytest.mark.slow
def test_the_slices_begin_with_the_weights_of_the_synchronous_steps(tmp_path):
    """Before the slices part, the losses are those of the run with an exchange in every step."""
    flags = "--steps=12 --every=4 --synchronous=8 --layers=1 --embed=64 --seq=32 --outer-rate=0.9 --outer-momentum=0.5 --seed=1"
    every_step, plain, _ = diloco.main([*flags.split(), "--picture", ""]).values()
    assert plain.losses[:8] == every_step.losses[:8]
    assert plain.losses[8] == pytest.approx(every_step.losses[8], rel=1e-3)
    assert plain.losses[11] != every_step.losses[11]
    assert every_step.sent > plain.sent > every_step.sent * 8 / 12
