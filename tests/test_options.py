"""The options of a step: every function takes them, and they are checked where they are given."""

import argparse
import inspect

import covering
import numpy as np
import pytest

import meshpar as mp
from meshpar._src.dims import PathDims
from meshpar._src.entry.options import OPTIONS, StepOptions, add_flags, given_flags

X = np.arange(32, dtype=np.float32).reshape(8, 4)
HOW = {"mesh": "data=8", "layout": "batch: data", "dims": {"x": "batch embed"}}


def doubled(x):
    return 2 * x


@pytest.mark.parametrize(
    "api", [mp.jit, mp.init, mp.plan, mp.check, mp.compile, mp.search, mp.hardware.calibrate, mp.lab]
)
def test_every_function_shows_every_option(api):
    shown = inspect.signature(api).parameters
    assert set(OPTIONS) <= set(shown)
    assert {name: shown[name].default for name in ("lowering", "overlap", "strict", "options", "calibration")} == {
        "lowering": "auto", "overlap": None, "strict": False, "options": "auto", "calibration": None,
    }  # fmt: skip


def test_values_are_normalized():
    options = StepOptions(dims={"x": "batch embed"}, options=None, lowering="jit", overlap="xla", compiler_options=None)
    assert options.dims == PathDims({"x": "batch embed"})
    assert (options.options, options.overlap, options.compiler_options, options.calibration) == ("off", None, {}, ())
    assert options.changed(strict=True) == StepOptions(
        dims={"x": "batch embed"}, options="off", lowering="jit", strict=True
    )
    assert StepOptions(static_argnames="n").with_static(["m"]).static_argnames == ("n", "m")


@pytest.mark.parametrize(
    ("call", "case"),
    covering.each(
        [
            lambda **o: mp.jit(doubled, **o),
            lambda **o: mp.init(doubled, **o),
            lambda **o: mp.plan(doubled, X, **o),
            lambda **o: mp.compile(doubled, X, **o),
            lambda mesh, layout, **o: mp.search(doubled, X, topology="v5e:2x4", **o),
            lambda layout, **o: mp.hardware.calibrate(doubled, X, layouts=layout, **o),
            lambda **o: mp.lab(doubled, X, **o),
            lambda layout, **o: mp.check(doubled, X, layouts=layout, **o),
        ],
        [
            ({"lowering": "jitt"}, "did you mean `jit`?"),
            ({"overlap": "rings"}, "did you mean `ring`?"),
            ({"lowering": "jit", "overlap": "ring"}, 'belongs to lowering="shard_map"'),
            ({"options": "of"}, "did you mean `off`?"),
            ({"calibration": "nowhere.json"}, "there is no calibration file nowhere.json"),
            ({"dims": "batch"}, "no tree-path patterns"),
        ],
    ),
)
def test_a_value_that_an_option_does_not_have_is_an_error(call, case):
    option, says = case
    with pytest.raises(mp.errors.MeshparError) as caught:
        call(**{**HOW, **option})
    assert says in str(caught.value)


@pytest.mark.parametrize("api", [mp.jit, mp.init])
def test_an_unknown_option_is_a_type_error(api):
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'loweirng'"):
        api(doubled, mesh="data=8", layout="", loweirng="jit")


def test_check_and_calibrate_keep_the_options_of_a_step():
    step = mp.jit(doubled, **HOW, lowering="jit")
    assert {row.lowering for row in mp.check(step, X, layouts="batch: data", mesh="data=8").rows} == {"jit"}
    assert {
        row.lowering for row in mp.check(step, X, layouts="batch: data", mesh="data=8", lowering="shard_map").rows
    } == {"shard_map"}
    found = mp.hardware.calibrate(step, X, layouts=["batch: data"], mesh="data=8", rounds=1, progress=False)
    assert [row.lowering for row in found.rows] == ["jit"]


def test_flags_are_those_of_the_fields():
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument)
    words = "--lowering jit --schedule gpipe --gather step --donate state --donate batch --strict --options off".split()
    words += ["--calibration", "here.json"]
    assert given_flags(parser.parse_args(words)) == {
        "lowering": "jit", "overlap": None, "schedule": "gpipe", "gather": "step", "strict": True,
        "donate_argnames": ["state", "batch"],
        "options": "off", "calibration": "here.json",
    }  # fmt: skip
    fewer = argparse.ArgumentParser()
    add_flags(fewer.add_argument, without=["calibration", "overlap"])
    assert given_flags(fewer.parse_args([])) == {
        "lowering": "auto", "schedule": "1f1b", "gather": None, "strict": False, "donate_argnames": None, "options": "auto",
    }  # fmt: skip


def test_a_schedule_that_does_not_exist():
    with pytest.raises(mp.errors.UnsupportedError, match="1f1b"):
        StepOptions(schedule="1f1")
