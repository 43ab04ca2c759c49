"""Random pipelines: a loop over microbatches around a loop over stacked layers, under layouts with stages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from programs import Case
from writer import Input, Program

import meshpar as mp
from meshpar._src.program.pipeline import SCHEDULES

MESHES = (
    "stage=4, x=2", "stage=2, x=4", "stage=2, x=2, y=2", "stage=2, x=2, idle=2", "stage=4, idle=2", "x=2, stage=2, y=2",
)  # fmt: skip
UPDATES = (
    "h = h + jnp.tanh(h @ {up}) @ {down} * 0.5",
    "h = h + nn.softmax(h @ {up}, -1) @ {down}",
    "h = h * jnp.tanh({bias}) + 0.5 * {bias}",
    "h = h / jnp.sqrt(1.0 + jnp.mean(jnp.square(h), -1, keepdims=True))",
    "h = h + jnp.tanh(h @ shared)",
    "h = jnp.where(mask[..., None], h, h * 0.5)",
    "h = jnp.where(jax.random.bernoulli(key, 0.75, h.shape), h, 0.0)",
    "aux = aux + jnp.mean(jnp.square(jnp.tanh(h)))",
    "h = jnp.cumsum(h, -1) * 0.25",
    "h = h + 0.5 * jnp.roll(h, 1, -1)",
    "h = h + 0.1 * jnp.sin(count.astype(F))",
    "h = lax.cond(count % 2 == 0, jnp.tanh, jnp.sin, h)",
    "h = lax.scan(lambda c, t: (jnp.tanh(c) + 0.1 * t, None), h, jnp.arange(2, dtype=F))[0]",
    "h = jnp.concatenate([h[..., 1:], h[..., :1]], -1)",
    "h = (h.astype(BF16) * 0 + 1).astype(F) * h",
)
"""Statements of a layer: on the carries ``h`` [batch, embed] or [batch, seq, embed], ``aux`` and ``count``, and on its weights."""
WITH_SEQ = ("h = h + 0.1 * jnp.tanh(jnp.einsum('bse,bte->bst', h, h)) @ h", "h = h + jnp.cumsum(h, 1) * 0.1")
STACKED = ("None", "None", "h.mean()", "jnp.tanh(h).sum(-1)", "h")
"""Results of a layer that the loop stacks."""
AROUND = ("accumulate", "accumulate", "scan", "reverse", "outside", "map", "one")
"""What is around the layers: ``mp.train.accumulate_gradients``, a scan with gradients (in either direction) or without (which is
differentiated from outside), a map of losses, no loop over microbatches."""


@dataclass
class _Sizes:
    """Sizes of a random pipeline."""

    layers: int
    microbatches: int
    rows: int
    seq: int
    embed: int
    mlp: int
    vocab: int = 8

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the tokens of a microbatch."""
        return (self.rows, self.seq) if self.seq else (self.rows,)


@dataclass
class _Layer:
    """The text of a layer: its statements, and the names and shapes of the weights that it reads."""

    lines: list[str]
    weights: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


def make_staged_case(rng: random.Random) -> Case:
    """A random case whose layout has ``layers: stage``."""
    mesh = rng.choice(MESHES)
    stages = int(mesh.split("stage=")[1][0])
    rounds = rng.choice((1, 1, 2, 3))
    microbatches = rng.choice((2, 3, 4, 5)) if rounds == 1 else stages * rng.choice((1, 2))
    around, layers = rng.choice(AROUND), stages * rounds * rng.choice((1, 1, 2))
    masked = 1 if rng.random() < 0.3 and around != "one" and layers > 3 and microbatches > 2 else 0
    sizes = _Sizes(layers - masked, microbatches, rng.choice((2, 4)), rng.choice((0, 0, 4)),
                   rng.choice((4, 8)), rng.choice((4, 16)))  # fmt: skip
    program = _program(rng, sizes, around)
    layout = _layout(rng, mesh, f"layers{'?' * masked}: stage*{rounds}")
    return Case(program, mesh, layout, schedule=rng.choice(SCHEDULES))


def _layer(rng: random.Random, sizes: _Sizes) -> _Layer:
    """A layer of one to five statements, at least one of which has a matmul with weights."""
    choices = [*UPDATES, *(WITH_SEQ if sizes.seq else ())]
    texts = [*rng.sample(choices, rng.randrange(5)), rng.choice(UPDATES[:2])]
    rng.shuffle(texts)
    layer = _Layer([])
    shapes = {
        "up": ("layers embed mlp", (sizes.embed, sizes.mlp)),
        "down": ("layers mlp embed", (sizes.mlp, sizes.embed)),
        "bias": ("layers embed", (sizes.embed,)),
    }
    for k, text in enumerate(texts):
        for name, (dims, shape) in shapes.items():
            if f"{{{name}}}" in text:
                layer.weights[f"{name}{k}"] = dims, (sizes.layers, *shape)
                text = text.replace(f"{{{name}}}", f"{name}{k}")
        layer.lines.append(text)
    return layer


def _program(rng: random.Random, sizes: _Sizes, around: str) -> Program:
    """A program: inputs, the loss of a microbatch, and what is around it."""
    layer = _layer(rng, sizes)
    body = "\n".join(layer.lines)
    inputs = [Input(name, shape, "f", tuple(dims.split())) for name, (dims, shape) in layer.weights.items()]
    inputs.append(Input("embedding", (sizes.vocab, sizes.embed), "f", ("vocab", "embed")))
    tied = rng.random() < 0.4
    if not tied:
        inputs.append(Input("head", (sizes.embed, sizes.vocab), "f", ("embed", "vocab")))
    if "shared" in body:
        inputs.append(Input("shared", (sizes.embed, sizes.embed), "f", ("embed", None)))
    weights = [i.name for i in inputs]
    lead = (sizes.microbatches * sizes.rows, *sizes.lead[1:])
    tokens = Input("tokens", lead, "i", ("batch", "seq")[: len(lead)])
    lines = ["weights_ = (" + ", ".join(weights) + ",)", *_loss(rng, sizes, layer, weights, tied)]
    lines += _around(rng, sizes, around)
    outs, grads = ["value"], weights if around == "outside" else []
    if around in ("accumulate", "scan", "reverse", "one"):
        outs += [f"g{k}" for k in range(len(weights))]
        lines.append(", ".join(outs[1:]) + ", = gradients")
    known = {i.name: (i.shape, i.kind) for i in inputs} | dict.fromkeys(outs, ((), "f"))
    return Program([*inputs, tokens], [lines], outs, grads, rng.randrange(1 << 20), known)


def _loss(rng: random.Random, sizes: _Sizes, layer: _Layer, weights: list[str], tied: bool) -> list[str]:
    """The lines of ``loss(weights, tokens)``."""
    stacked = [*layer.weights, "key"]
    result, remat = rng.choice(STACKED), rng.random() < 0.4
    lines = ["def loss(weights_, tokens):", f"    {', '.join(weights)}, = weights_", "    mask = tokens > 3"]
    lines += ["    def layer(carry, xs):", "        h, aux, count = carry", f"        {', '.join(stacked)}, = xs"]
    lines += [f"        {text}" for text in layer.lines]
    lines += [f"        return (h, aux, count + 1), {result}"]
    keys = f"jax.random.split(jax.random.key(7), {sizes.layers})"
    xs = f"({', '.join([*layer.weights, keys])},)"
    reverse = rng.random() < 0.2
    fn = "jax.checkpoint(layer)" if remat else "layer"
    lines += [
        "    first = embedding[tokens], jnp.zeros((), F), jnp.zeros((), jnp.int32)",
        f"    (h, aux, count), ys = lax.scan({fn}, first, {xs}, reverse={reverse})",
        f"    logits = h @ {'embedding.T' if tied else 'head'}",
        "    chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]",
        "    total = jnp.mean(nn.logsumexp(logits, -1) - chosen) + 0.1 * aux",
        f"    return total{' + 0.1 * jnp.mean(jnp.tanh(ys))' if result != 'None' else ''}",
    ]
    return lines


def _around(rng: random.Random, sizes: _Sizes, around: str) -> list[str]:
    """The lines that compute ``value``, and ``gradients`` where they are taken inside."""
    m, shape = sizes.microbatches, ", ".join(map(str, (sizes.microbatches, *sizes.lead)))
    if around == "accumulate":
        return [f"value, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss), {m})(weights_, tokens)"]
    if around == "one":
        return ["value, gradients = jax.value_and_grad(loss)(weights_, tokens)"]
    if around == "map":
        return [f"value = lax.map(lambda rows: loss(weights_, rows), tokens.reshape({shape}))"]
    if around == "outside":
        return [
            "def one(total, rows):",
            "    return total + loss(weights_, rows), None",
            f"value = lax.scan(one, jnp.zeros((), F), tokens.reshape({shape}))[0]",
        ]
    clip = rng.random() < 0.3
    scale = " / jnp.maximum(1.0, jnp.sqrt(sum(jnp.sum(g * g) for g in found)))" if clip else ""
    return [
        "def one(carry, rows):",
        "    total, largest = carry",
        "    now, found = jax.value_and_grad(loss)(weights_, rows)",
        f"    return (jax.tree.map(lambda t, g: t + g{scale}, total, found), jnp.maximum(largest, now)), now",
        "start = jax.tree.map(jnp.zeros_like, weights_), jnp.full((), -jnp.inf, F)",
        f"(gradients, value), losses = lax.scan(one, start, tokens.reshape({shape}), reverse={around == 'reverse'})",
    ]


def _layout(rng: random.Random, mesh: str, stages: str) -> mp.Layout:
    """The rule of the stages, and optional rules for some of the other dims over the other axes."""
    axes = [part.split("=")[0].strip() for part in mesh.split(",")]
    axes = [a for a in axes if a not in ("stage", "idle")]
    rules = [stages]
    for dim in rng.sample(("batch", "embed", "mlp", "vocab", "seq"), rng.randrange(1, 5)):
        over = rng.sample(axes, rng.randrange(1, len(axes) + 1)) if axes else []
        if dim == "vocab" and rng.random() < 0.5:
            over = ["stage", *over]
        if over:
            rules.append(f"{dim}?: {'+'.join(over)}")
    rng.shuffle(rules)
    return mp.Layout("; ".join(rules))
