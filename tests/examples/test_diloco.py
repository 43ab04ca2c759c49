"""DiLoCo on two slices: losses fall, few bytes are sent between slices, and there is a picture."""

import diloco
import matplotlib.image
import pytest


@pytest.mark.slow
def test_the_losses_fall_with_a_few_exchanges(tmp_path):
    picture = tmp_path / "curves.png"
    flags = "--steps=16 --every=4 --layers=1 --embed=64 --batch=8 --seq=32".split()
    runs = diloco.main([*flags, "--picture", str(picture)])
    every_step, plain, streaming = runs.values()
    for run in runs.values():
        assert len(run.losses) == 16
        assert run.losses[-1] < 0.8 * run.losses[0]
        assert run.held_out < 0.8 * run.losses[0]
    assert plain.sent == pytest.approx(every_step.sent / 4, rel=0.02)
    assert streaming.sent == pytest.approx(plain.sent / 4, rel=0.15)  # codes, exponents and weights of replicas
    assert min(matplotlib.image.imread(picture).shape[:2]) > 500
