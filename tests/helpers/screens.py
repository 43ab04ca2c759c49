"""Reports as a terminal shows them, stored in ``tests/report/screens``, at three widths.

``python tests/helpers/screens.py`` writes them all, ``python tests/helpers/screens.py plan`` those whose names begin with ``plan``.
"""

import functools
import os
import re
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax import lax

import meshpar as mp
from meshpar._src.entry.cli import command_parser
from meshpar._src.report.document import plain
from meshpar._src.verify.check import Report, Row

FOLDER = Path(__file__).parents[1] / "report" / "screens"
WIDTHS = (80, 100, 160)
OPTIMIZER = optax.adam(1e-3)
DIMS = {
    "state/*/embedding": "vocab embed",
    "state/*/up": "layers embed mlp",
    "state/*/down": "layers mlp embed",
    "tokens": "batch seq",
}


def train_step(state, tokens):
    """A table, residual blocks in a loop over layers, and a tied head; in four microbatches."""

    def loss_of(params, tokens):
        def block(x, w):
            with jax.named_scope("mlp"):
                return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

        with jax.named_scope("embed"):
            x = params["embedding"][tokens]
        x, _ = lax.scan(block, x, {"up": params["up"], "down": params["down"]})
        with jax.named_scope("head"):
            logits = (x @ params["embedding"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    loss, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss_of), 4)(state["params"], tokens)
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def arguments(layers=8, vocab=32768, embed=2048, mlp=8192, batch=64, seq=1024, dtype=jnp.bfloat16):
    """Shapes of the arguments of the step."""
    shapes = {"embedding": (vocab, embed), "up": (layers, embed, mlp), "down": (layers, mlp, embed)}
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    state = {"params": params, "opt_state": jax.eval_shape(OPTIMIZER.init, params)}
    return state, jax.ShapeDtypeStruct((batch, seq), jnp.int32)


@functools.cache
def planned(layout="batch: data; mlp, vocab: model; embed: data", mesh="data=4, model=2", **sizes):
    how = {"mesh": mesh, "topology": "v5e:2x4", "dims": DIMS, "donate_argnames": ("state",)}
    return mp.plan(train_step, *arguments(**sizes), layout=layout, **how)


def searched():
    how = {"topology": "v5e:2x4", "dims": DIMS, "donate_argnames": ("state",)}
    return mp.search(train_step, *arguments(batch=8), max_plans=60, **how)


def small():
    """The step's arguments with numbers, small enough to run."""
    shapes = arguments(layers=2, vocab=64, embed=16, mlp=32, batch=32, seq=8, dtype=jnp.float32)
    keys = iter(jax.random.split(jax.random.key(0), 16))
    params = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape, s.dtype) / 4, shapes[0]["params"])
    return {"params": params, "opt_state": OPTIMIZER.init(params)}, jnp.arange(32 * 8).reshape(32, 8) % 64


def checked():
    """A report with all kinds of rows."""
    mesh, long, short = "data=4, model=2", "batch: data; mlp, vocab: model; embed: data", "batch: data"
    leaf, moment = "0/params/up", "0/opt_state/0/nu/embedding"
    wrong = mp.errors.CheckError(
        f"the layout `{long}` changes `{leaf}` on the mesh {mesh}: 0.25 of the largest value, allowed: 1e-05",
        path=leaf,
        source="train.py:39 (block)",
        fixes=["report it, with this program"],
    )
    rows = [
        Row(mesh, short, "shard_map", leaf, 1.9e-6, 11),
        Row(
            mesh, long, "shard_map", leaf, 2.2e-6, 11, (moment,), rounding=0.31, rounding_path=moment, dtype="bfloat16"
        ),
        Row(mesh, long, "jit", leaf, 0.25, 11, error=wrong),
    ]
    return Report(rows, [("data=64", short, "tokens: dim `batch` of size 32 does not divide over data=64")])


def compiled():
    how = {"layout": "batch: data; mlp, vocab: model; embed: data", "dims": DIMS, "progress": False, "cache": False}
    return mp.compile(train_step, *small(), mesh=mp.mesh("data=4, model=2"), **how)


DOCUMENTS = {
    "plan": planned,
    "plan-too-large": lambda: planned("batch: data", layers=32, embed=4096, mlp=16384),
    "plan-pipeline": lambda: planned("batch: data; layers: stage", "stage=4, data=2"),
    "search": searched,
    "diff": lambda: planned("batch, embed: data", "data=8").diff(planned()),
    "check": checked,
    "compile": compiled,
}
"""Name of a report → what makes it."""

HELPS = {"help": None, "help-plan": "plan", "help-search": "search"}
"""Name of a screen → the command whose help it is; None: all commands."""


def masked(text):
    """The text without what depends on the machine: the duration of a compilation."""
    return re.sub(r", in [\d.]+ s$", ", in N s", text, flags=re.MULTILINE) + "\n"


def screens(name):
    """Width → the screen of this name."""
    if name in HELPS:
        command, texts = HELPS[name], {}
        for width in WIDTHS:
            with mock.patch.dict(os.environ, {"COLUMNS": str(width)}):
                parser = command_parser()
                texts[width] = (parser if command is None else parser.commands[command]).format_help()
    else:
        document = DOCUMENTS[name]()
        texts = {width: plain(document, width) for width in WIDTHS}
    return {width: masked(text.rstrip("\n")) for width, text in texts.items()}


def path_of(name, width):
    return FOLDER / f"{name}-{width}.txt"


if __name__ == "__main__":
    mp.virtual_devices(8)
    jax.config.update("jax_platforms", "cpu")
    for name in (*DOCUMENTS, *HELPS):
        if name.startswith(tuple(sys.argv[1:]) or ""):
            for width, text in screens(name).items():
                path_of(name, width).write_text(text, encoding="utf8")
