"""Lines of a program's ops: the user's, through functions that JAX traces by themselves and through packages."""

import importlib.util
import inspect
import json

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.plan.text import plan_steps
from meshpar._src.report.colours import AxisColours
from meshpar._src.report.plan_html_page import collectives_table

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
        "import flax.linen as nn\n"
        "class Net2(nn.Module):\n"
        "    @nn.compact\n"
        "    def __call__(self, x):\n"
        "        for k in range(3):\n"
        "            x = nn.Dense(16, name=f'layer_{k}')(x)\n"
        "        return nn.Dense(4, name='head')(x)\n"
    )
    spec = importlib.util.spec_from_file_location("package", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(fn):
    """Of the only collective of a function, which no package has called."""
    plan = mp.plan(fn, X, mesh="data=2, model=4", layout="batch: data", dims={"x": "batch embed"})
    (found,) = {(c.source, c.module, c.package_line, c.location) for c in plan.collectives}
    assert found == (found[0], "", "", found[0])
    return found[0]


def line(fn, text):
    """Where a line of a function is, as plans write it."""
    lines, first = inspect.getsourcelines(fn)
    (number,) = (first + i for i, one in enumerate(lines) if text in one)
    return f"test_source.py:{number} ({fn.__name__})"


def test_a_function_that_jax_compiles_by_itself_is_of_the_line_that_calls_it():
    jax.eval_shape(jnp.var, X)  # has been traced elsewhere before

    def step(x):
        y = jnp.tanh(x)
        return jnp.var(y), jnp.linalg.norm(y)  # here

    assert source(step).endswith(line(step, "# here"))


def test_a_users_function_that_is_compiled_by_itself_has_the_line_within():
    @jax.jit
    def inner(x):
        return x.sum()  # within

    def step(x):
        return inner(x)

    assert source(step).endswith(line(inner.__wrapped__, "# within"))


@pytest.mark.parametrize(("how", "number"), [("total", 5), ("mean", 7)])
def test_the_line_of_a_package(package, how, number):
    """It is shown next to the user's line, or alone."""
    function = getattr(package, how)

    def step(x):
        return function(x)  # here

    where = {"mesh": "data=2", "layout": "batch: data", "dims": {"x": "batch embed"}}
    plan = mp.plan(step, X, **where)
    (found,) = plan.collectives
    assert found.source.endswith(line(step, "# here"))
    assert found.package_line == f"package.py:{number} ({how})"
    assert found.location == f"{found.source}, in package.py:{number} ({how})"
    assert json.loads(plan.to_json())["collectives"][0]["package_line"] == found.package_line
    (found,) = mp.plan(function, X, **where).collectives
    assert found.source.endswith(f"package.py:{number} ({how})")
    assert found.location == found.source


def gradients_of(model, layout):
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.ones((8, 16))))

    def loss(params, x):
        return model.apply(params, x).mean()  # the only line of the user

    return mp.plan(jax.grad(loss), params, X, mesh="data=2, model=4", layout=layout, dims={"x": "batch _"})


def test_the_modules_of_a_model_from_a_package(package):
    plan = gradients_of(package.Net2(), "batch: data")
    assert len({c.source for c in plan.collectives}) == 1
    assert {c.module for c in plan.collectives} >= {f"Net2/{m}" for m in ("layer_0", "layer_1", "layer_2", "head")}
    assert all(c.location == f"{c.module} ({c.source.rpartition(' (')[0]})" for c in plan.collectives)
    steps = plan_steps(plan)
    text = "\n".join((str(plan), collectives_table(plan.collectives, AxisColours(plan.sizes), False)))
    assert "Net2/layer_1" in steps
    assert "Net2/layer_*" in text  # the rows of equal layers are one
    assert "Net2/layer_1" not in text
    assert {c["module"] for c in json.loads(plan.to_json())["collectives"]} == {c.module for c in plan.collectives}


@pytest.mark.parametrize(
    ("weights", "module"),
    [
        ({"blocks": {"up": {"kernel": True}}}, "blocks/up"),
        ({"params": {"mlp": {"kernel": True}}}, "mlp"),
        ({"kernel": True}, ""),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_matmul_without_scopes_is_in_the_module_of_its_weight(weights, module, stacked):
    """Also in a loop over stacked layers, and of a cast and transposed weight; elementwise ops have none."""
    w = jax.tree.map(lambda _: jax.ShapeDtypeStruct((4, 8, 8)[not stacked :], jnp.float32), weights)

    def fn(model, x):
        (kernel,) = jax.tree.leaves(model)

        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16).T), None

        return jax.lax.scan(layer, x, kernel)[0] if stacked else layer(x, kernel)[0]

    x = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)

    def step(model, x):
        return jax.tree.map(lambda w, g: w - g, model, jax.grad(lambda m: fn(m, x).astype(jnp.float32).sum())(model))

    plan = mp.plan(step, w, x, mesh="data=4", layout="batch: data", dims={"x": "batch embed"})
    ops = [*plan.program.root.walk()]
    assert next(op for op in ops if op.name == "dot_general").module == module
    assert {op.module for op in ops if op.name == "tanh"} == {""}
