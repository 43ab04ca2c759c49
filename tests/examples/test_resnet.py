"""The ResNet-50 of the examples: its plan."""

import pytest

import meshpar as mp
import resnet


@pytest.fixture(scope="module")
def plan():
    step, args, dims = resnet.resnet50(batch=256)
    return mp.plan(step, *args, mesh="data=16", topology="v5e:4x4", layout=resnet.DATA, dims=dims)


def test_its_flops_are_those_of_the_published_model(plan):
    forward = 2 * 4.09e9 * 256  # 4.09e9 products an image
    assert plan.time.model_flops == pytest.approx(3 * forward, rel=0.03)  # but for the cotangent of the images


def test_the_statistics_are_of_the_global_batch(plan):
    norms = sum(path.path.endswith("/mean") for path in plan.inputs)
    assert norms == 53
    summed = [c for c in plan.collectives if c.op == "all-reduce" and "mean" not in c.dims]
    assert len(summed) >= 4 * norms  # mean and mean of squares, and the gradients of scale and bias
