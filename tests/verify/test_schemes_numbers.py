"""Every scheme on every mesh gives the unsharded run's new state: parameters, moments and loss, dropout included."""

import pytest
import small_transformer as model

import meshpar as mp

MESHES = ["data=1, model=8", "data=2, model=4", "data=2, model=2, idle=2"]


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(s, marks=[pytest.mark.slow] * (s != "fsdp + megatron")) for s in model.LAYOUTS],
)
@pytest.mark.slow
def test_scheme(scheme):
    step = model.step_of(rename=scheme == "context parallel")
    report = mp.check(step, *model.create(), layouts=[model.LAYOUTS[scheme]], meshes=MESHES, dims=model.DIMS)
    assert report.ok
    assert len(report.rows) == len(MESHES)
