"""Small programs whose proofs and results are compared: of mutants of meshpar (`mutants.py --prove`) and
of faults (`prove.py --faults`)."""

from __future__ import annotations

import gc
import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import meshpar as mp
from meshpar._src.compat.jax import make_generated_jaxpr, without_dead_code
from meshpar._src.lower.shard_map import lower_to_shard_map
from meshpar._src.verify.numbers import QUICK
from meshpar._src.verify.proofs import claims_of
from meshpar._src.verify.prove import prove_program

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import llama

MESH = "data=2, model=4"
VOCAB, EMBED, MLP, BATCH, SEQ = 48, 16, 64, 8, 16
S = jax.ShapeDtypeStruct


def gradient_step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """An update of parameters by the gradient of a loss."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def mlp(params: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ params["up"] + params["bias"])
    return jnp.mean((h @ params["down"] - x) ** 2)


def lookups(params: Any, tokens: jax.Array) -> jax.Array:
    logits = jnp.tanh(params["table"][tokens]) @ params["head"]
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()


def convolutions(params: Any, x: jax.Array) -> jax.Array:
    def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x = jax.nn.relu(conv(x, params["first"], 1))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return jnp.mean(conv(x, params["second"], 2) ** 2)


def decode(weights: Any, cache: jax.Array, x: jax.Array, position: jax.Array) -> Any:
    """One token: attention over the rows of a cache, and the best token of a sharded vocab."""
    scores = jnp.where(jnp.arange(cache.shape[1]) <= position[:, None], jnp.einsum("be,bse->bs", x, cache), -jnp.inf)
    y = jnp.einsum("bs,bse->be", jax.nn.softmax(scores), cache)
    return y @ weights["key"], jnp.argmax(y @ weights["head"], -1)


def layers(params: Any, x: jax.Array) -> jax.Array:
    """A loop over layers with dropout, whose heads are split and merged, and running sums along the sequence."""

    def layer(carry: Any, w: jax.Array) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        h = jnp.cumsum((x @ w).reshape(*x.shape[:-1], 4, -1), axis=1).transpose(0, 2, 1, 3)
        h = jnp.concatenate([h[..., 1:], h[..., :1]], -1).transpose(0, 2, 1, 3).reshape(x.shape)
        return (x + jnp.where(jax.random.bernoulli(own, 0.5, x.shape), jnp.sin(h), 0.0), key), jnp.max(h, -1)

    (x, _), tops = jax.lax.scan(layer, (x, jax.random.key(0)), params["layers"])
    return jnp.mean(x**2) + tops.mean() + jax.nn.logsumexp(x, 1).sum() + jnp.prod(jnp.tanh(x), 1).mean()


def chosen(x: jax.Array, ids: jax.Array, at: jax.Array) -> Any:
    """Ops of one batch: sorts, extrema, counts, slices and updates at run-time indices, a branch, and a loop of unknown length."""
    best, index = jax.lax.top_k(x, 3)
    moved = jax.lax.dynamic_update_slice(x, 2 * jax.lax.dynamic_slice(x, (0, at), (x.shape[0], 4)), (0, at + 1))
    counts = jnp.zeros((x.shape[1],), jnp.int32).at[ids].add(1)
    rows = jnp.where(jnp.any(x > 0.5, 1, keepdims=True), jnp.pad(x[:, 1:-1], ((0, 0), (1, 1))), jnp.flip(x, 1))
    branch = jax.lax.cond(at > 3, lambda x: x.min(0), lambda x: x.max(0), x)
    halved = jax.lax.while_loop(lambda y: jnp.abs(y).sum() > 1.0, lambda y: y / 2, x)
    return (
        best,
        index,
        moved,
        counts,
        rows,
        branch,
        halved,
        jnp.sort(x, 1),
        jnp.argmin(x, 0),
        ids.sum(),
        jnp.all(ids > 2),
    )


def programs() -> Iterator[tuple[str, Callable[[], mp.Plan]]]:
    """(name, plan) of each program."""

    def plan(step: Callable[..., Any], args: Sequence[Any], dims: Any, layout: str, **options: Any) -> mp.Plan:
        return mp.plan(step, *args, mesh=mp.mesh(MESH), layout=layout, dims=dims, lowering="shard_map", **options)

    def arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
        return {k: S(shape, jnp.float32) for k, shape in shapes.items()}

    params = arrays(up=(EMBED, MLP), down=(MLP, EMBED), bias=(MLP,))
    dims = {"*/up": "embed mlp", "*/down": "mlp embed", "*/bias": "mlp", "batch/0": "batch embed"}
    of = (
        gradient_step(mlp),
        (params, S((BATCH, EMBED), jnp.float32)),
        dims,
    )
    for layout in ("batch: data", "batch: data; mlp: model", "batch: data; embed: data; mlp: model"):
        yield f"matmuls, {layout}", lambda layout=layout: plan(*of, layout)
    long = params, S((2, SEQ, EMBED), jnp.float32)
    named = dims | {"batch/0": "batch seq embed"}
    for layout in ("batch: data; seq: model; mlp: model", "batch: data; embed: data; mlp: model"):
        yield f"ring, {layout}", lambda layout=layout: plan(of[0], long, named, layout, overlap="ring")
    weights = arrays(table=(VOCAB, EMBED), head=(EMBED, VOCAB))
    tokens = {"*/table": "vocab embed", "*/head": "embed vocab", "batch/0": "batch seq"}
    ids = S((BATCH, SEQ), jnp.int32)
    looked_up = gradient_step(lookups), (weights, ids), tokens
    for layout in ("batch: data; vocab: model", "batch, embed: data; vocab: model"):
        yield f"lookups, {layout}", lambda layout=layout: plan(*looked_up, layout)
    kernels = arrays(first=(3, 3, 4, 8), second=(3, 3, 8, 8))
    images = {"params/*": "_ _ _ _", "batch/0": "batch height width _"}
    image = S((BATCH, 32, 8, 4), jnp.float32)
    convolved = gradient_step(convolutions), (kernels, image), images
    for layout in ("batch: data; height: model", "batch: model; height: data"):
        yield f"halos, {layout}", lambda layout=layout: plan(*convolved, layout)
    served = arrays(key=(EMBED, EMBED), head=(EMBED, VOCAB))
    slots = {
        "weights/key": "_ _", "weights/head": "_ vocab", "cache": "batch slot _", "x": "batch _", "position": "batch",
    }  # fmt: skip
    state = served, S((BATCH, SEQ, EMBED), jnp.float32), S((BATCH, EMBED), jnp.float32), S((BATCH,), jnp.int32)
    for layout in ("batch: data; slot, vocab: model", "slot, vocab: data+model"):
        yield f"decode, {layout}", lambda layout=layout: plan(decode, state, slots, layout)
    stack = gradient_step(layers), (arrays(layers=(2, EMBED, EMBED)), S((BATCH, SEQ, EMBED), jnp.float32))
    rows = {"params/layers": "layers _ embed", "batch/0": "batch seq embed"}
    for layout in ("batch: data; embed: model", "batch: data"):
        yield f"layers, {layout}", lambda layout=layout: plan(*stack, rows, layout)
    picked = chosen, (S((BATCH, VOCAB), jnp.float32), S((BATCH,), jnp.int32), S((), jnp.int32))
    for layout in ("batch: data+model", "batch: data; vocab: model"):
        yield (
            f"choices, {layout}",
            lambda layout=layout: plan(*picked, {"x": "batch vocab", "ids": "batch", "at": ""}, layout),
        )
    for layout in ("fsdp_tensor", "sequence_parallel"):
        yield (
            f"transformer {layout}",
            lambda layout=layout: plan(*llama.tiny(attention="xla", heads=8, kv_heads=4), llama.LAYOUTS[layout]),
        )


def lowered(plan: mp.Plan) -> ClosedJaxpr:
    """The per-device program, of flat arguments."""
    like = [S(v.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in plan.program.inputs]
    return make_generated_jaxpr(lower_to_shard_map(plan, plan.mesh)[0], *like)


def arguments(program: ClosedJaxpr) -> list[Any]:
    """Random arguments; integers are below :data:`VOCAB`."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(
            rng.integers(0, VOCAB, a.shape) if jnp.issubdtype(a.dtype, jnp.integer) else rng.normal(size=a.shape) / 4,
            a.dtype,
        )
        for a in program.in_avals
    ]


def run(program: ClosedJaxpr, args: Sequence[Any]) -> list[jax.Array]:
    """The results of a program on 8 virtual devices."""
    return jax.jit(jaxpr_as_fun(program), compiler_options=QUICK[-1])(*args)


def equal(found: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> bool:
    """Whether results are the same, up to rounding."""
    pairs = zip(found, wanted, strict=True)
    return all(x.shape == y.shape and np.allclose(x, y, rtol=2e-3, atol=2e-5, equal_nan=True) for x, y in pairs)


def text_of(program: ClosedJaxpr) -> str:
    """A program as text, which is equal for equal programs of two processes."""
    return re.sub("0x[0-9a-f]+", "", f"{program} {[np.asarray(c).tolist() for c in program.consts]}")


def planned(name: str) -> mp.Plan:
    """The plan of a program, on virtual devices."""
    warnings.simplefilter("ignore")
    mp.virtual_devices(8)
    return dict(programs())[name]()


def record(name: str, output: Path) -> None:
    """Write what mutants of a program are compared with: its text and proof, the lines of meshpar that planning and lowering it
    execute, and the results of the function as written."""
    import coverage

    lines = coverage.Coverage(data_file=None, source=[str(Path(mp.__file__).parent)], config_file=False)
    with lines.collect():
        plan = planned(name)
        program = lowered(plan)
    proof, written, data = plan.prove(), plan.program.traced.written, lines.get_data()
    args = arguments(written)
    wanted = run(written, args)
    right = equal(run(program, args), wanted)
    np.savez(output.with_suffix(".npz"), *map(np.asarray, wanted))
    executed = {file: data.lines(file) for file in data.measured_files()}
    results = [r.status for r in proof.results]
    output.write_text(json.dumps({"text": text_of(program), "results": results, "equal": right, "lines": executed}))


def try_mutant(path: Path, text: str, names: Sequence[str], folder: Path, output: Path) -> None:
    """Write what becomes of programs under a mutant of a module: (outcome, cause) of each.

    The outcome is ``error`` if there is no program, ``same programs``, or that of the proof of another program: its status, of
    the results that are proven without the mutant. A program with results that are proven runs: these results are the same as
    without the mutant, or it is ``proven, other results``.

    Args:
      path, text: the module, and its text as the mutant has it.
      names: the programs.
      folder: of the files that :func:`record` wrote.
    """
    replace_code(path, text)
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        base = json.loads((folder / f"{name}.json").read_text())
        try:
            plan = planned(name)
            program = lowered(plan)
        except Exception as e:
            found[name] = "error", repr(e)[:200]
            if len(found) > 1 and {status for status, *_ in found.values()} == {"error"}:
                break
            continue
        if text_of(program) == base["text"]:
            found[name] = "same programs", ""
            continue
        written = plan.program.traced.written
        proof = prove_program(written, program, claims=claims_of(plan))
        cause = str(next(iter(proof.failed), ""))[:200]
        statuses = {k: proof.results[k].status for k, s in enumerate(base["results"]) if s == "proven"}
        proven = [k for k, s in statuses.items() if s == "proven"]
        outcome = next(
            s for s in ("refused", "not verified", "proven, same results") if s.split(",")[0] in statuses.values()
        )
        if proven and not same_results(program, proven, arguments(written), folder / f"{name}.npz"):
            outcome = "proven, other results"
        found[name] = outcome, cause
    output.write_text(json.dumps(found))


def same_results(program: ClosedJaxpr, which: Sequence[int], args: Sequence[Any], wanted: Path) -> bool:
    """Whether some results of a program are those in a file; not if the program cannot run."""
    part = program.jaxpr.replace(outvars=[program.jaxpr.outvars[k] for k in which], debug_info=None)
    try:
        results = run(without_dead_code(ClosedJaxpr(part, program.consts)), args)
    except Exception:
        return False
    with np.load(wanted) as arrays:
        return equal(results, [arrays[f"arr_{k}"] for k in which])


def replace_code(path: Path, text: str) -> None:
    """Replace the code of the functions of a module, which is imported, by that of another text.

    Raises:
      ValueError: a function that the module has made lacks a variable of another one.
    """
    functions = defaultdict[CodeType, list[FunctionType]](list)
    for found in gc.get_objects():
        if isinstance(found, FunctionType) and found.__code__.co_filename == str(path):
            functions[found.__code__].append(found)
    old_and_new = (compile(t, str(path), "exec", dont_inherit=True) for t in (path.read_text(), text))
    for old, new in code_pairs(*old_and_new):
        for function in functions[old]:
            function.__code__ = new


def code_pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The code of functions in two versions of a module, where it differs."""
    own, others = ([c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new))
    for a, b in zip(own, others, strict=False):
        if a != b:
            yield a, b
        yield from code_pairs(a, b)
