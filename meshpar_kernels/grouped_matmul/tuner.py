"""Measures the fastest tile, number of stages and number of blocks of a grouped matmul on the local device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar_kernels import _compat
from meshpar_kernels.config import Config
from meshpar_kernels.grouped_matmul import gpu, grouped_matmul, grouped_matmul_transpose
from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
from meshpar_kernels.isolation import Worker
from meshpar_kernels.timing import device_seconds
from meshpar_kernels.tuning_table import Entry, MatmulKey

MARGIN = 0.98
"""A choice replaces the analytic one if its time is below this fraction: medians vary by one or two percent."""


class WrongValueError(Exception):
    """The kernel computes wrong values with the analytic choice: no measurement of this device may be stored."""


Bench = Callable[[Config], tuple[float, Sequence[float]]]
"""Measures one matmul on one device with a configuration: its largest difference from the reference over the reference's largest
value, and the seconds of one or several calls; none where the values are wrong. It raises the compiler's exceptions."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The measurements of one matmul.

    Attributes:
      entry: for the table.
      seconds: median of every choice that was timed.
      refused: choices that do not compile or run, and why.
      wrong: choices whose values are wrong, and by how much; they were not timed.
    """

    entry: Entry
    seconds: dict[Config, float]
    refused: dict[Config, str]
    wrong: dict[Config, float]


def limit_of(dtype: Any) -> float:
    """Largest accepted error of a result: a few roundings of its dtype."""
    return {"bfloat16": 1e-2, "float16": 2e-3}.get(jnp.dtype(dtype).name, 1e-4)


def tune(
    bench: Bench, choices: Sequence[Config], *, limit: float, done: Callable[[Config, float | None], None] | None = None
) -> Tuned:
    """Check and time choices, of which the first is the analytic one.

    Args:
      choices: without repetition.
      limit: an error above it (or NaN) is wrong.
      done: called after each choice with its median seconds, None if it has none.

    Raises:
      WrongValueError: the first one is wrong.
      Exception: the compiler's, for the first configuration.
    """
    medians: dict[Config, float] = {}
    refused: dict[Config, str] = {}
    wrong: dict[Config, float] = {}
    for i, config in enumerate(choices):
        try:
            error, seconds = bench(config)
            if error <= limit:
                medians[config] = statistics.median(seconds)
            elif i == 0:
                raise WrongValueError(f"with {config} the result is wrong by {error:.2g} of its largest value")
            else:
                wrong[config] = error
        except WrongValueError:
            raise
        except Exception as problem:  # a compiler's exception; each compiler has types of its own
            if i == 0:
                raise
            refused[config] = f"{type(problem).__name__}: {problem}"[:200]
        if done is not None:
            done(config, medians.get(config))
    analytic = medians[choices[0]]
    best = min(medians, key=lambda config: medians[config])
    if medians[best] >= MARGIN * analytic:
        best = choices[0]
    return Tuned(Entry(best, medians[best], analytic, jax.__version__), medians, refused, wrong)


def candidates(matmul: MatmulKey, dtype: Any, platform: str) -> list[Config]:
    """The analytic choice first, then others that fit on-chip memory; [] if the kernel cannot run this matmul.

    Args:
      platform: "tpu" or "cuda".
    """
    itemsize = jnp.dtype(dtype).itemsize
    return list(dict.fromkeys((_for_tpu if platform == "tpu" else _for_gpu)(matmul, itemsize)))


def _for_gpu(p: MatmulKey, itemsize: int) -> list[Config]:
    """Configurations of the GPU kernels, the analytic choice first; may have repetitions."""
    back = p.transposes

    def most_stages(config: Config) -> int:
        return gpu.make_tile(config, itemsize, p).stages

    first = gpu.with_tile(Config(), p)
    configs = [dataclasses.replace(first, stages=most_stages(first))]
    for inner in (64, 128):
        for width in (w for w in (64, 128, 192, 256) if w * p.matrices <= 256 and w < 2 * p.n):
            if _compat.gpu_architecture()[0] == 10:
                clusters, forms = [2] * (width % 128 == 0), [None]
            else:  # two adjacent tiles
                clusters = [2] * (-(-p.k // gpu.ROWS) % 2 == 0 if back else -(-p.n // width) % 2 == 0)
                forms = [None, True] if back and width <= 128 else [None]
            tile = (inner, gpu.ROWS, width) if back else (gpu.ROWS, inner, width)
            for pingpong, cluster in itertools.product(forms, [None, *clusters]):
                config = Config(tile, cluster=cluster, pingpong=pingpong)
                most, fewest = most_stages(config), 4 if pingpong else 2
                numbers = [most] if pingpong or cluster else range(most - 2, most + 1)
                configs += [dataclasses.replace(config, stages=s) for s in numbers if s >= fewest]
    return configs


def _for_tpu(p: MatmulKey, itemsize: int) -> list[Config]:
    """Configurations of the TPU kernels, the analytic choice first; [] if no tile fits VMEM."""
    first = tpu_tiles.pick_tile(p, itemsize)
    heights, inner = (128, 256, 512), _widths(p.k) if p.transposes else [p.k]
    tiles = [tpu_tiles.Tile(*sizes) for sizes in itertools.product(heights, inner, _widths(p.n))]
    return [] if first is None else [Config((tile.m, tile.k, tile.n)) for tile in (first, *tiles)]


def _widths(size: int) -> list[int]:
    return [w for w in (256, 512, 1024, 2048) if size % w == 0] or [size]


class DeviceBench:
    """A matmul of normally distributed operands on the first device; group sizes are random (multinomial), as from a
    router.

    The reference is the loop of XLA operations, whose order of summation does not depend on a tile.
    """

    def __init__(self, matmul: MatmulKey, dtype: Any):
        """Create the operands, and compute the reference result."""
        self.matmul, self.dtype = matmul, dtype
        p, rng = matmul, np.random.default_rng(0)
        weights = (p.groups, p.n, p.k) if p.transposed else (p.groups, p.k, p.n)
        shapes = [(p.rows, p.k), *([(p.rows, p.n)] if p.transposes else [weights] * p.matrices)]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        self.operands = [jax.random.normal(key, s, jnp.dtype(dtype)) for key, s in zip(keys, shapes, strict=True)]
        self.sizes = jnp.asarray(rng.multinomial(p.rows, np.full(p.groups, 1 / p.groups)), jnp.int32)
        self.want = np.asarray(jax.jit(self._function(implementation="xla"))(*self.operands), np.float32)

    def _function(self, **how: Any) -> Callable[..., jax.Array]:
        """A function of (lhs, rhs, …) that calls the matmul with these options."""
        p = self.matmul

        def call(lhs: jax.Array, *others: jax.Array) -> jax.Array:
            """The matmul with the bench's group sizes."""
            if p.transposes:
                return grouped_matmul_transpose(lhs, others[0], self.sizes, **how)
            if p.matrices == 2:
                options = {"activation": "silu", "transpose_rhs": p.transposed, **how}
                return grouped_matmul(lhs, (others[0], others[1]), self.sizes, **options)
            return grouped_matmul(lhs, others[0], self.sizes, transpose_rhs=p.transposed, **how)

        return call

    def __call__(self, config: Config) -> tuple[float, list[float]]:
        """As `Bench`; the error is infinite if the result is not finite."""
        function = jax.jit(self._function(implementation="pallas", config=config))
        got = np.asarray(function(*self.operands), np.float32)
        error = float(np.abs(got - self.want).max()) / max(float(np.abs(self.want).max()), 1e-30)
        right = error <= limit_of(self.dtype)
        return (
            error if math.isfinite(error) else math.inf,
            [device_seconds(function, self.operands)[0]] if right else [],
        )


@contextlib.contextmanager
def isolated_bench(matmul: MatmulKey, dtype: Any, *, limit: float = 120) -> Iterator[Bench]:
    """`DeviceBench` in a worker process: a configuration that crashes the process or hangs is refused, and costs itself alone.

    Args:
      limit: seconds for one configuration. The bench raises WorkerError if it was refused, failed, crashed the process, or took
        longer.
    """
    fields = {"matmul": dataclasses.asdict(matmul), "dtype": jnp.dtype(dtype).name}
    with Worker(f"{__name__}:measure") as worker:

        def bench(config: Config) -> tuple[float, list[float]]:
            reply = worker.call({**fields, "config": vars(config)}, limit)
            return reply["error"], reply["seconds"]

        yield bench


@functools.lru_cache(maxsize=1)
def _bench(dtype: str, **matmul: Any) -> DeviceBench:
    return DeviceBench(MatmulKey(**matmul), dtype)


def measure(matmul: dict[str, Any], dtype: str, config: dict[str, Any]) -> dict[str, Any]:
    """Error of one configuration, and its seconds where the error is within `limit_of`; called in a worker process."""
    error, seconds = _bench(dtype, **matmul)(Config(**config))
    return {"error": error, "limit": limit_of(dtype), "seconds": seconds}


def platform() -> str:
    """ "tpu" or "cuda" if there is a local device whose kernels can be tuned; else ""."""
    jax.devices()
    reply = _compat.backend_platform()
    return reply if reply in ("tpu", "cuda") else ""
