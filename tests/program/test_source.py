"""Lines of a program's ops: the user's, through functions that JAX traces by themselves and through packages."""

import importlib.util
import inspect

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


@pytest.fixture
def package(tmp_path):
    """A module that is installed, as far as its path says; its functions are compiled by themselves, and not."""
    path = tmp_path / "site-packages" / "package.py"
    path.parent.mkdir()
    path.write_text(
        "import jax\n"
        "import jax.numpy as jnp\n"
        "@jax.jit\n"
        "def total(x):\n"
        "    return jnp.exp(x).sum()\n"
        "def mean(x):\n"
        "    return jax.lax.reduce_sum(x, (0, 1)) / x.size\n"
    )
    spec = importlib.util.spec_from_file_location("package", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(fn):
    plan = mp.plan(fn, X, mesh="data=2, model=4", layout="batch: data", dims={"x": "batch embed"})
    return {c.source for c in plan.collectives}


def line(fn, text):
    """Where a line of a function is, as plans write it."""
    lines, first = inspect.getsourcelines(fn)
    (number,) = (first + i for i, one in enumerate(lines) if text in one)
    return f"test_source.py:{number} ({fn.__name__})"


@pytest.mark.parametrize("how", ["total", "mean"])
def test_what_a_package_makes_is_of_the_users_line(package, how):
    def step(x):
        y = jnp.tanh(x)
        return getattr(package, how)(y)  # here

    (found,) = sources(step)
    assert found.endswith(line(step, "# here"))


def test_a_function_that_jax_compiles_by_itself_is_of_the_line_that_calls_it():
    jax.eval_shape(jnp.var, X)  # has been traced elsewhere before

    def step(x):
        y = jnp.tanh(x)
        return jnp.var(y), jnp.linalg.norm(y)  # here

    (found,) = sources(step)
    assert found.endswith(line(step, "# here"))


def test_a_users_function_that_is_compiled_by_itself_has_the_line_within():
    @jax.jit
    def inner(x):
        return x.sum()  # within

    def step(x):
        return inner(x)

    (found,) = sources(step)
    assert found.endswith(line(inner.__wrapped__, "# within"))


@pytest.mark.parametrize(("how", "number"), [("total", 5), ("mean", 7)])
def test_without_a_line_of_the_user_it_is_the_packages(package, how, number):
    (found,) = sources(lambda x: getattr(package, how)(x))
    assert "test_source.py" in found
    plan = mp.plan(getattr(package, how), X, mesh="data=2", layout="batch: data", dims={"x": "batch embed"})
    (found,) = {c.source for c in plan.collectives}
    assert found.endswith(f"package.py:{number} ({how})")
