"""The cases that `benchmarks/device.py` times and `benchmarks/gpu_compile.py` compiles: kernels, operands, baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar_kernels import grouped_matmul, grouped_matmul_transpose, ring_attention, scaled_grouped_matmul
from meshpar_kernels.config import Config
from meshpar_kernels.published_model_shapes import MATMULS, MODELS, AttentionShape
from meshpar_kernels.routing import gpu as routing_gpu
from meshpar_kernels.routing import reference, tpu_gather
from meshpar_kernels.routing import tpu as routing_tpu
from meshpar_kernels.tuning_table import MatmulKey

TOKENS = 8192
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
MATMUL_KERNELS = ("forward", "d lhs", "d rhs", "swiglu")
ROUTING_KERNELS = ("route", "permute", "combine")
ATTENTION_KERNELS = ("attention", "d attention")
SCALED = ("g64", "deepseek-v3-up", "deepseek-v3-down")
"""Shapes of the grouped matmul of 8-bit operands with block scales."""
ATTENTION = {"llama3-8b-8k": AttentionShape(tokens=8192, heads=32, kv_heads=8, head_dim=128)}
FORMS = {
    "": Config(),
    "cluster": Config(cluster=2),
    "ping-pong": Config(pingpong=True),
    "ping-pong, cluster": Config(pingpong=True, cluster=2),
}
"""Name → configuration of a grouped matmul; "" is the default form."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
      arguments: (shape, dtype) of each; the last of a matmul's are the group sizes.
      ours: the Pallas kernel.
      others: name → the same by other means of JAX, "reference" first: what values are compared with.
      flops: operations that the result needs; None for what only moves bytes.
      bytes: bytes that must be read and written once.
    """

    arguments: list[tuple[tuple[int, ...], Any]]
    ours: Callable[..., Any]
    others: dict[str, Callable[..., Any]]
    flops: int | None
    bytes: int


def names() -> list[tuple[str, str]]:
    """(kernel, shape) of every case, the more telling ones first."""
    rows = [(kernel, shape) for shape in MATMULS for kernel in MATMUL_KERNELS[:3]]
    rows += [("swiglu", shape) for shape in MATMULS if shape.endswith("-up")]
    rows += [(kernel, model) for model in ("mixtral-8x7b", "deepseek-v3") for kernel in ROUTING_KERNELS]
    first = [r for r in rows if r[1] == "g64"]
    rest = [r for r in rows if r not in first]
    return first + rest + [(k, a) for a in ATTENTION for k in ATTENTION_KERNELS] + [("scaled", s) for s in SCALED]


def forms(kernel: str, target: str) -> list[str]:
    """Those of `FORMS` that a kernel has on a GPU."""
    if kernel not in MATMUL_KERNELS[:3]:
        return [""]
    return [form for form in FORMS if "ping-pong" not in form or (kernel, target) == ("d rhs", "sm_90a")]


def make(kernel: str, shape: str) -> Case:
    """The case of this name."""
    if kernel == "scaled":
        return _scaled(shape)
    if kernel in ATTENTION_KERNELS:
        return _attention(kernel, shape)
    return _matmul(kernel, shape) if shape in MATMULS else _routing(kernel, shape)


def _nbytes(arguments: list[tuple[tuple[int, ...], Any]]) -> int:
    return sum(int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in arguments)


def _gradient(function, which: int):
    """Of lhs (0) or rhs (1) alone: of a forward pass that is linear, and so not run."""

    def call(other, grad, like, sizes):
        def matmul(x):
            pair = (x, other) if which == 0 else (other, x)
            return function(*pair, sizes)

        return jax.vjp(matmul, jnp.zeros(like.shape, like.dtype))[1](grad)[0]

    return call


def _matmul(kernel: str, shape: str) -> Case:
    s = MATMULS[shape]
    lhs, rhs, out = ((s.m, s.k), BF16), ((s.groups, s.k, s.n), BF16), ((s.m, s.n), BF16)
    sizes = ((s.groups,), I32)

    def ours(implementation):
        return lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes, implementation=implementation)

    if kernel == "swiglu":
        scale = ((s.m,), F32)

        def swiglu(implementation):
            def call(lhs, gate, up, scale, sizes):
                return grouped_matmul(
                    lhs, (gate, up), sizes, activation="silu", row_scale=scale, implementation=implementation
                )

            return call

        def ragged_swiglu(lhs, gate, up, scale, sizes):
            gate, up = (jax.lax.ragged_dot(lhs, matrix, sizes) for matrix in (gate, up))
            return (jax.nn.silu(gate.astype(F32)) * up * scale[:, None]).astype(lhs.dtype)

        others = {"reference": swiglu("reference"), "xla loop": swiglu("xla"), "ragged_dot": ragged_swiglu}
        arguments = [lhs, rhs, rhs, scale, sizes]
        return Case(arguments, swiglu("pallas"), others, 2 * s.flops, _nbytes([lhs, rhs, rhs, out]))
    total = _nbytes([lhs, rhs, out])
    if kernel == "forward":
        others = {"reference": ours("reference"), "xla loop": ours("xla"), "ragged_dot": jax.lax.ragged_dot}
        others |= _optional_forward(False)
        others["dense matmul"] = lambda lhs, rhs, sizes: lhs @ rhs[0]
        return Case([lhs, rhs, sizes], ours("pallas"), others, s.flops, total)
    if kernel == "d lhs":

        def d_lhs(implementation):
            return lambda rhs, grad, sizes: grouped_matmul(
                grad, rhs, sizes, transpose_rhs=True, implementation=implementation
            )

        def ragged(rhs, grad, sizes):
            like = jax.ShapeDtypeStruct(*lhs)
            return _gradient(jax.lax.ragged_dot, 0)(rhs, grad, like, sizes)

        others = {"reference": d_lhs("reference"), "xla loop": d_lhs("xla"), "ragged_dot": ragged}
        others |= {name: _swapped(function) for name, function in _optional_forward(True).items()}
        return Case([rhs, out, sizes], d_lhs("pallas"), others, s.flops, total)

    def d_rhs(implementation):
        return lambda lhs, grad, sizes: grouped_matmul_transpose(lhs, grad, sizes, implementation=implementation)

    def ragged(lhs, grad, sizes):
        return _gradient(jax.lax.ragged_dot, 1)(lhs, grad, jax.ShapeDtypeStruct(*rhs), sizes)

    others = {"reference": d_rhs("reference"), "xla loop": d_rhs("xla"), "ragged_dot": ragged}
    try:
        from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot
    except ImportError:
        pass
    else:

        def jax_kernel(lhs, grad, sizes):
            return transposed_ragged_dot(
                lhs, grad, group_sizes=sizes, block_m=128, block_n=128, block_k=64, max_concurrent_steps=4,
                grid_block_n=8,
            )  # fmt: skip

        others["jax's mgpu"] = jax_kernel
    return Case([lhs, out, sizes], d_rhs("pallas"), others, s.flops, total)


def _scaled(shape: str) -> Case:
    """float8_e4m3fn codes with the block scales of DeepSeek-V3."""
    s = MATMULS[shape]
    f8 = jnp.float8_e4m3fn
    arguments = [
        ((s.m, s.k), f8), ((s.m, s.k // 128), F32), ((s.groups, s.n, s.k), f8), ((s.groups, s.n // 128, s.k // 128), F32),
        ((s.groups,), I32),
    ]  # fmt: skip

    def by(implementation):
        return lambda *operands: scaled_grouped_matmul(*operands, implementation=implementation)

    moved = _nbytes(arguments) + _nbytes([((s.m, s.n), BF16)])
    return Case(arguments, by("pallas"), {"reference": by("xla"), "xla loop": by("xla")}, s.flops, moved)


def _attention(kernel: str, shape: str) -> Case:
    """Causal attention on one device, bfloat16; "d attention": its gradients alone, as far as XLA can omit the result."""
    s = ATTENTION[shape]
    q, kv = ((1, s.tokens, s.heads, s.head_dim), BF16), ((1, s.tokens, s.kv_heads, s.head_dim), BF16)

    def own(implementation):
        return lambda q, k, v: ring_attention(q, k, v, None, causal=True, implementation=implementation)

    def jax_cudnn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    functions = {"": own(None), "reference": own("xla"), "xla loop": own("xla"), "jax.nn, cudnn": jax_cudnn}
    flops = 2 * s.tokens**2 * s.heads * s.head_dim  # two matmuls over half the scores
    if kernel == "attention":
        ours, arguments = functions.pop(""), [q, kv, kv]
        return Case(arguments, ours, functions, flops, _nbytes([q, kv, kv, q]))

    def gradients(function):
        return lambda q, k, v, g: jax.vjp(function, q, k, v)[1](g)

    differentiated = {name: gradients(function) for name, function in functions.items()}
    ours, arguments = differentiated.pop(""), [q, kv, kv, q]
    # the forward pass runs for its residuals: 2 matmuls, and 5 in the backward pass
    return Case(arguments, ours, differentiated, flops * 7 // 2, _nbytes([*arguments, q, kv, kv]))


def _swapped(function):
    return lambda rhs, grad, sizes: function(grad, rhs, sizes)


def with_config(kernel: str, config: Config) -> Callable[..., Any]:
    """The Pallas kernel of a grouped matmul with a given configuration."""
    how: dict[str, Any] = {"implementation": "pallas", "config": config}
    if kernel == "forward":
        return lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes, **how)
    if kernel == "d lhs":
        return lambda rhs, grad, sizes: grouped_matmul(grad, rhs, sizes, transpose_rhs=True, **how)
    return lambda lhs, grad, sizes: grouped_matmul_transpose(lhs, grad, sizes, **how)


BASELINES = {
    "gpu": ("ragged_dot", "xla loop", "jax's mgpu", "tokamax", "torch", "deep_gemm", "dense matmul"),
    "tpu": ("ragged_dot", "xla loop", "jax's megablox", "dense matmul"),
}
"""Platform → implementations to compare the kernels with. "dense matmul" multiplies as many rows by one matrix: a bound."""


def implementations(kernel: str, platform: str) -> list[str]:
    """The baselines that may have a kernel, whether installed or not."""
    if kernel in ATTENTION_KERNELS:
        return ["jax.nn, cudnn", "xla loop", "torch"] if platform == "gpu" else ["xla loop"]
    if kernel == "scaled":
        return ["xla loop", "torch"] if platform == "gpu" else []
    if kernel in ROUTING_KERNELS:
        names = ["reference"] + ["take"] * (kernel == "permute")
        if platform == "gpu" and kernel != "route":
            names += ["triton", "torch"]
        return names
    dropped = {
        "forward": (),
        "d lhs": ("tokamax", "deep_gemm", "dense matmul"),
        "d rhs": ("tokamax", "deep_gemm", "dense matmul", "jax's megablox"),
        "swiglu": ("jax's mgpu", "jax's megablox", "tokamax", "torch", "deep_gemm", "dense matmul"),
    }
    return [name for name in BASELINES[platform] if name not in dropped[kernel]]


def matmul_of(kernel: str, shape: str) -> MatmulKey:
    """The matmul of a case, as the tuning table names it."""
    s = MATMULS[shape]
    k, n = (s.n, s.k) if kernel == "d lhs" else (s.k, s.n)
    op = "grouped_matmul_transpose" if kernel == "d rhs" else "grouped_matmul"
    return MatmulKey(op, s.m, k, n, s.groups, matrices=2 if kernel == "swiglu" else 1, transposed=kernel == "d lhs")


def _optional_forward(transpose_rhs: bool) -> dict[str, Callable[..., Any]]:
    """Kernels that are there only with some installations."""
    found: dict[str, Callable[..., Any]] = {}
    if jax.default_backend() == "tpu":
        try:
            from jax.experimental.pallas.ops.tpu.megablox import gmm
        except ImportError:
            return found
        return {"jax's megablox": lambda lhs, rhs, sizes: gmm(lhs, rhs, sizes, lhs.dtype, transpose_rhs=transpose_rhs)}
    try:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    except ImportError:
        pass
    else:

        def jax_kernel(lhs, rhs, sizes):
            return ragged_dot(
                lhs, rhs, group_sizes=sizes, block_m=128, block_n=128, block_k=64, max_concurrent_steps=4,
                grid_block_n=8, transpose_rhs=transpose_rhs,
            )  # fmt: skip

        found["jax's mgpu"] = jax_kernel
    if not transpose_rhs:
        try:
            import tokamax  # pyright: ignore[reportMissingImports]
        except ImportError:
            pass
        else:
            found["tokamax"] = lambda lhs, rhs, sizes: tokamax.ragged_dot(lhs, rhs, sizes)
    return found


def _routing(kernel: str, model: str) -> Case:
    m = MODELS[model]
    on_tpu = jax.default_backend() == "tpu"
    route, gather_sum = (
        (routing_tpu.route, tpu_gather.gather_sum) if on_tpu else (routing_gpu.route, routing_gpu.gather_sum)
    )
    rows = TOKENS * m.k
    if kernel == "route":
        how = reference.Router(m.k, m.score, m.groups, m.top_groups, 2, m.renormalize, m.scale)
        logits, bias = ((TOKENS, m.experts), F32), ((m.experts,), F32)
        moved = _nbytes([logits]) + 12 * rows
        return Case(
            [logits, bias],
            lambda logits, bias: route(logits, bias if m.bias else None, how),
            {"reference": lambda logits, bias: reference.route(logits, bias if m.bias else None, how)},
            None,
            moved,
        )
    row_bytes = 2 * m.embed
    triton = {} if on_tpu else {"triton": routing_gpu.triton_gather_sum}
    if kernel == "permute":
        return Case(
            [((TOKENS, m.embed), BF16), ((rows,), I32)],
            lambda x, token: gather_sum(x, token[:, None], None),
            {"reference": lambda x, token: reference.gather_sum(x, token[:, None], None), "take": lambda x, t: x[t]}
            | {name: (lambda x, token, f=f: f(x, token[:, None], None)) for name, f in triton.items()},
            None,
            (TOKENS + rows) * row_bytes,
        )
    return Case(
        [((rows, m.embed), BF16), ((TOKENS, m.k), I32), ((TOKENS, m.k), F32)],
        gather_sum,
        {"reference": reference.gather_sum} | triton,
        None,
        (TOKENS + rows) * row_bytes,
    )


def group_sizes(rows: int, groups: int, load: str) -> np.ndarray:
    """int32 [groups]: "even", or "random", a multinomial draw."""
    if load == "even":
        return np.full(groups, rows // groups, np.int32)
    return np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)


def draw(case: Case, kernel: str, shape: str, load: str) -> list[jax.Array]:
    """Arguments with values: normal numbers, and indices and sizes that make sense."""
    arrays = []
    for number, (size, dtype) in enumerate(case.arguments):
        if dtype == I32 and shape in MATMULS:
            values = jnp.asarray(group_sizes(MATMULS[shape].m, MATMULS[shape].groups, load))
        elif kernel == "scaled" and dtype == F32:
            values = jax.random.uniform(jax.random.key(number), size, F32, 0.01, 0.1)
        elif dtype == I32:
            rows = case.arguments[0][0][0]
            order = np.random.default_rng(1).permutation(int(np.prod(size))) % rows
            values = jnp.asarray(order.reshape(size), I32)
        else:
            values = jax.random.normal(jax.random.key(number), size, F32).astype(dtype)
            if kernel in MATMUL_KERNELS and number == 1:
                values = (values / np.sqrt(size[-1])).astype(dtype)
        arrays.append(values)
    return arrays
