"""A small train step to try layouts on, and random edits of its layout."""

import random

import jax
import jax.numpy as jnp

import meshpar as mp

TOPOLOGY = "v5e:4x4"
MESH = "data=4, model=4"
RULES = ["batch: data", "mlp: model", "embed: data"]
DIMS = {"state/w": "layers embed mlp", "state/v": "layers mlp embed", "x": "batch embed"}
FLOAT = jnp.float32
STATE = {"w": jax.ShapeDtypeStruct((4, 256, 512), FLOAT), "v": jax.ShapeDtypeStruct((4, 512, 256), FLOAT)}
X = jax.ShapeDtypeStruct((64, 256), FLOAT)


def train_step(state, x):
    def loss(state):
        def layer(x, weights):
            return jnp.tanh(x @ weights["w"]) @ weights["v"], None

        return jnp.mean(jax.lax.scan(layer, x, state)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


def planned(mesh: str, layout: str, topology: str | None = TOPOLOGY, x=X, **options) -> mp.Plan:
    """As ``mp.plan`` has it, without a lab."""
    return mp.plan(
        train_step, STATE, x, mesh=mesh, topology=topology, layout=layout, dims=DIMS, donate_argnames="state", **options
    )


def pipelined(stages: int, microbatches: int) -> mp.Plan:
    """The plan of the step with microbatches and its layers as stages."""

    def step(state, x):
        def loss(state, x):
            h, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["w"]) @ w["v"], None), x, state)
            return jnp.mean(h**2)

        return mp.train.accumulate_gradients(jax.grad(loss), microbatches)(state, x)

    mesh = f"stage={stages}, data={16 // stages}"
    x = batch_of(32 * microbatches)
    return mp.plan(step, STATE, x, mesh=mesh, topology=TOPOLOGY, layout="layers: stage; batch: data", dims=DIMS)


def batch_of(n: int) -> jax.ShapeDtypeStruct:
    """The input with another batch size."""
    return jax.ShapeDtypeStruct((n, X.shape[1]), FLOAT)


def lab(x=X, **options):
    """A lab of the step."""
    begin = {"mesh": MESH, "topology": TOPOLOGY, "layout": "; ".join(RULES), "dims": DIMS, **options}
    return mp.lab(train_step, STATE, x, donate_argnames="state", **begin)


def resizable(**options):
    """A lab whose page offers another batch size."""
    made = lab(**options)
    made.session.sizes = {"batch": X.shape[0]}
    made.session.resized = lambda sizes: lab(batch_of(sizes["batch"]), **options).session
    return made


def edits(n: int, seed: int = 0):
    """(mesh, rows of text and whether they hold), each a random edit of the one before."""
    draw = random.Random(seed)
    mesh, rows = dict.fromkeys(("data", "model"), 4), [[text, True] for text in RULES]
    for _ in range(n):
        edit = draw.choice(["mesh", "order", "switch", "axes", "add", "remove"])
        if edit == "mesh":
            size = draw.choice([1, 2, 4, 8, 16])
            mesh = {"data": size, "model": 16 // size}
        elif edit == "order" and len(rows) > 1:
            rows.insert(draw.randrange(len(rows)), rows.pop(draw.randrange(len(rows))))
        elif edit == "switch" and rows:
            row = draw.choice(rows)
            row[1] = not row[1]
        elif edit == "axes" and rows:
            row = draw.choice(rows)
            row[0] = f"{row[0].split(':')[0]}: {draw.choice(['data', 'model', 'data+model', 'model+data', 'none'])}"
        elif edit == "add" and len(rows) < 6:
            dim, axis = draw.choice(["batch", "embed", "mlp", "layers"]), draw.choice(["data", "model"])
            rows.append([f"{dim}?: {axis}", True])
        elif edit == "remove" and len(rows) > 1:
            rows.pop(draw.randrange(len(rows)))
        yield ", ".join(f"{a}={n}" for a, n in mesh.items()), [tuple(row) for row in rows]
