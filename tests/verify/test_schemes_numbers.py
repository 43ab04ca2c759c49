"""Every scheme gives the unsharded run's new state: parameters, moments and loss, dropout included."""

import covering
import pytest
import small_transformer as model

import meshpar as mp

MESHES = ["data=1, model=8", "data=2, model=4", "data=2, model=2, idle=2"]


@pytest.mark.slow  # all of them a minute
@pytest.mark.parametrize(("scheme", "mesh"), covering.each(list(model.LAYOUTS)[::-2], MESHES))
def test_scheme(scheme, mesh):
    step = model.step_of(rename=scheme == "context parallel")
    report = mp.check(step, *model.create(), layouts=[model.LAYOUTS[scheme]], meshes=[mesh], dims=model.DIMS)
    assert report.ok
    assert len(report.rows) == 1
