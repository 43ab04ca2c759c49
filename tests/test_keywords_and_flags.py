"""The options of a step: every function takes them, and they are checked where they are given."""

import argparse
import ast
from pathlib import Path

import covering
import numpy as np
import optax
import pytest

import meshpar as mp
from meshpar._src.dims import PathDims
from meshpar._src.entry.options import StepOptions
from meshpar._src.keywords_and_flags import add_flags, given_flags

X = np.arange(32, dtype=np.float32).reshape(8, 4)
HOW = {"mesh": "data=8", "layout": "batch: data", "dims": {"x": "batch embed"}}


def doubled(x):
    return 2 * x


def functions(package: str):
    """(place, AST of the parameters) of every function and method of a package, public or not."""
    for path in sorted((Path(mp.__file__).parents[1] / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.stem}.{node.name}", node.args


@pytest.mark.parametrize("package", ["meshpar", "meshpar_kernels"])
def test_no_function_has_more_than_12_parameters(package):
    """``self`` is not counted; ``*args`` and ``**options`` are one each."""
    found = list(functions(package))
    assert len(found) > 500
    for name, f in found:
        parameters = {a.arg for a in [*f.posonlyargs, *f.args, *f.kwonlyargs, f.vararg, f.kwarg] if a}
        assert len(parameters - {"self", "cls"}) <= 12, name


def test_values_are_normalized():
    options = StepOptions(dims={"x": "batch embed"}, options=None, lowering="jit", overlap="xla", compiler_options=None)
    assert options.dims == PathDims({"x": "batch embed"})
    assert (options.options, options.overlap, options.compiler_options, options.calibration) == ("off", None, {}, ())
    same = {"dims": {"x": "batch embed"}, "options": "off", "lowering": "jit"}
    assert options.changed(strict=True) == StepOptions(**same, strict=True)
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
            lambda layout, **o: mp.hardware.calibrate(doubled, X, layout=layout, **o),
            lambda **o: mp.lab(doubled, X, **o),
            lambda layout, **o: mp.check(doubled, X, layout=layout, **o),
            lambda **o: mp.train.local_sgd(doubled, over="data", every=2, outer=optax.sgd(1.0), **o),
        ],
        [
            ({"lowering": "jitt"}, "did you mean `jit`?"),
            ({"overlap": "rings"}, "did you mean `ring`?"),
            ({"lowering": "jit", "overlap": "ring"}, 'belongs to lowering="shard_map"'),
            ({"options": "of"}, "did you mean `off`?"),
            ({"calibration": "nowhere.json"}, "there is no calibration file nowhere.json"),
            ({"dims": "batch"}, "no tree-path patterns"),
            ({"schedule": "1f1"}, "did you mean `1f1b`"),
        ],
    ),
)
def test_a_value_that_an_option_does_not_have_is_an_error(call, case):
    option, says = case
    with pytest.raises(mp.errors.MeshparError) as caught:
        call(**{**HOW, **option})
    assert says in str(caught.value)


@pytest.mark.parametrize("api", [mp.jit, mp.init, mp.train.local_sgd])
def test_an_unknown_option_is_a_type_error(api):
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'loweirng'; did you mean 'lowering'"):
        api(doubled, mesh="data=8", layout="", loweirng="jit")


def test_a_keyword_of_search_is_an_option_of_search_or_of_a_step_or_an_argument():
    def step(x, scale):
        return x * scale

    how = {"topology": "v5e:2x2", "dims": HOW["dims"], "max_plans": 2}
    found = mp.search(step, X, scale=2.0, mesh={"data": 4}, layouts=["batch: data"], **how)
    assert (found.best.mesh, found.planned <= 2) == ("data=4", True)
    says = "`max_plans` is an option of search and an argument of <lambda>"
    with pytest.raises(mp.errors.UnsupportedError, match=says):
        mp.search(lambda x, max_plans: x, X, **how)


def test_check_and_calibrate_keep_the_options_of_a_step():
    step = mp.jit(doubled, **HOW, lowering="jit")
    for options, lowering in (({}, "jit"), ({"lowering": "shard_map"}, "shard_map")):
        report = mp.check(step, X, layout="batch: data", mesh="data=8", **options)
        assert [row.lowering for row in report.rows] == [lowering]
    found = mp.hardware.calibrate(step, X, layout=["batch: data"], mesh="data=8", rounds=1, progress=False)
    assert [row.lowering for row in found.rows] == ["jit"]


def test_flags_are_those_of_the_fields():
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument, StepOptions)
    words = "--lowering jit --schedule gpipe --gather step --donate state --donate batch --strict --options off".split()
    words += ["--calibration", "here.json", "--names", "a=b"]
    assert given_flags(parser.parse_args(words), StepOptions) == {
        "names": {"a": "b"}, "lowering": "jit", "overlap": None, "schedule": "gpipe", "gather": "step", "strict": True,
        "donate_argnames": ["state", "batch"],
        "options": "off", "calibration": "here.json",
    }  # fmt: skip
    fewer = argparse.ArgumentParser()
    add_flags(fewer.add_argument, StepOptions, without=["calibration", "overlap"])
    assert given_flags(fewer.parse_args([]), StepOptions) == {
        "names": None, "lowering": "auto", "schedule": "1f1b", "gather": None, "strict": False, "donate_argnames": None,
        "options": "auto",
    }  # fmt: skip
