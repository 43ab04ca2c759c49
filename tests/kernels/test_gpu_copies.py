"""The schedules of the GPU kernels through a model of the copy engine, which clips by tiles where arrays index; and what the
kernels refuse against what the compiler does."""

import contextlib
import functools
import itertools

import covering
import gpu_runs
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from gpu_machine import Gpus, copy_map
from kernel_machine import SCHEDULES, Fault

from meshpar_kernels import Config, _compat
from meshpar_kernels.collective_matmul import gpu as fused
from meshpar_kernels.grouped_matmul import blackwell, gpu, hopper, schedule
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem

TILE = gpu_runs.TILE
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def test_a_window_that_begins_within_a_tile_loses_the_rest_of_every_tile():
    """Of 16 rows from row 3 on the engine knows 5 of each 8: the coordinate row % 8 leaves its dim of extent 8."""
    assert copy_map(3, 16, 64, 8).tolist() == [3, 4, 5, 6, 7, -1, -1, -1, 11, 12, 13, 14, 15, -1, -1, -1]
    assert copy_map(8, 16, 64, 8).tolist() == [*range(8, 24)]
    assert copy_map(56, 16, 64, 8).tolist() == [*range(56, 64), *[-1] * 8]
    assert copy_map(3, 4, 6, None).tolist() == [3, 4, 5, -1]
    assert copy_map(0, 16, 5, 8).tolist() == [*range(5), *[-1] * 11]  # an array of less than a tile is one
    with pytest.raises(Fault, match="20 elements are no multiple of the tile of 8"):
        copy_map(0, 8, 20, 8)


LOADS = {
    "even": [64, 64, 64, 64],
    "one row each": [1, 1, 1, 1],
    "across tiles": [125, 6, 61, 64],
    "empty ones": [0, 131, 0, 0, 125],
    "from the last row": [255, 1],
    "negative and too many": [9, -3, 300, 4],
    "random 0": np.random.default_rng(0).multinomial(250, [1 / 7] * 7).tolist(),
}


@pytest.mark.parametrize(("module", "sizes"), covering.each(gpu_runs.GROUPED.values(), LOADS.values()), ids=LOADS)
def test_each_row_is_read_as_itself_and_each_element_is_written_once(module, sizes):
    """And the transpose sums each group's rows and no others. More orders of events: `test_protocols`."""
    for order in SCHEDULES[::32]:
        gpu_runs.matmul(module, sizes, order)
        gpu_runs.transpose(module, sizes, order)


@pytest.mark.parametrize("name", ["across tiles", "empty ones", "negative and too many"])
def test_two_blocks_of_a_cluster_compute_adjacent_tiles_of_shared_operands(name):
    """Whatever the groups, both go through the same steps; of three tiles the last has its twin beyond the result."""
    sizes, shared, alone = LOADS[name], TILE._replace(cluster=2), TILE
    for order in SCHEDULES[::25]:
        found = gpu_runs.matmul(hopper, sizes, order, tile=shared, n=192, num_sms=4)
        gpu_runs.transpose(hopper, sizes, order, tile=shared, k=384, num_sms=4)
        gpu_runs.transpose(hopper, sizes, order, tile=TILE._replace(stages=4, pingpong=True))
        gpu_runs.transpose(hopper, sizes, order, tile=TILE._replace(stages=4, pingpong=True, cluster=2), k=256)
    apart = gpu_runs.matmul(hopper, sizes, tile=alone, n=192)
    lhs = "input 6"
    assert found.copied[lhs] * 3 == apart.copied[lhs] * 2  # two pairs of columns, where there were three


@pytest.mark.parametrize("name", ["across tiles", "negative and too many"])
def test_two_blocks_of_a_cluster_multiply_together(name):
    """Blackwell's: tiles of 256 rows, of which each block has its half; the last block of columns of lhs is without its twin."""
    tile, sizes = TILE._replace(n=128, cluster=2), LOADS[name]
    gpu_runs.matmul(blackwell, sizes, SCHEDULES[0], tile=tile, n=192)
    gpu_runs.matmul(blackwell, sizes, SCHEDULES[-1], tile=tile)
    gpu_runs.transpose(blackwell, sizes, SCHEDULES[-1], tile=tile, k=384)


OPTIONS = [
    {"activation": "silu", "gated": True, "scaled": True, "rows": 264},
    {"transpose_rhs": True, "group_offset": 1, "rows": 40, "k": 64, "scaled": True},
    {"activation": "gelu", "gated": True, "transpose_rhs": True},
    {"transpose_rhs": True, "group_offset": 1, "n": 192},
    {"rows": 264, "k": 40, "n": 40},
]
FORMS = [(module, TILE) for module in gpu_runs.GROUPED.values()]
CLUSTERS = [(blackwell, TILE._replace(n=128, cluster=2)), (hopper, TILE._replace(n=64, cluster=2))]


@pytest.mark.parametrize(
    ("form", "options"), [*itertools.product(FORMS, OPTIONS), *itertools.product(CLUSTERS, OPTIONS[:2])]
)
def test_grouped_matmul_with_its_options(form, options):
    module, tile = form
    gpu_runs.matmul(module, [3, 70, 0, 21], tile=tile, **options)


def test_where_copies_may_begin_is_what_the_model_is_about(monkeypatch):
    """With tiles that begin at a group's first row, whatever it is, rows are lost that arrays would index."""
    monkeypatch.setattr(schedule, "ALIGNMENT", 1)
    for module in gpu_runs.GROUPED.values():
        gpu_runs.matmul(module, [128, 128])
        with pytest.raises(Fault, match=r"value|written"):
            gpu_runs.matmul(module, LOADS["random 0"])


@pytest.mark.parametrize("rows", [3, 50, 255])
def test_any_number_of_rows(rows, monkeypatch):
    """Those that the engine cannot cut into tiles are brought to the next multiple."""
    monkeypatch.setattr(_compat, "multiprocessors", lambda: 2)
    sizes = [rows // 3, 0, rows - rows // 3 - 1]
    lhs, rhs, grad = gpu_runs.draw(0, rows, 64), gpu_runs.draw(1, 3, 64, 64), gpu_runs.draw(2, rows, 64)
    group_sizes, found = jnp.asarray(sizes), []
    problem = MatmulProblem(lhs, (rhs,), group_sizes, out_dtype=gpu_runs.F16)
    transpose = TransposeProblem(lhs, grad, group_sizes, groups=3, out_dtype=gpu_runs.F16)
    tile = gpu.make_tile(gpu.with_tile(Config(), problem.key), 2, problem.key)
    for one in (problem, transpose):
        Gpus().run(lambda _, one=one: found.append(gpu.run(one, tile=tile)))
    gpu_runs.same(found[0], oracle.grouped_matmul(lhs, rhs, sizes), "grouped_matmul")
    gpu_runs.same(found[1], oracle.grouped_matmul_transpose(lhs, grad, sizes), "grouped_matmul_transpose")


@pytest.mark.parametrize(
    ("module", "devices", "rows", "n"),
    [(module, *case) for module, case in covering.each(gpu_runs.FUSED.values(), [(2, 8, 64), (3, 136, 64)])],
)
def test_fused_matmuls_over_nvlink(module, devices, rows, n):
    for order in SCHEDULES[::25]:
        gpu_runs.gather(module, order, devices=devices, rows=rows, n=n, transposed=devices == 3)
        gpu_runs.scatter(module, order, devices=devices, rows=rows, n=n, transposed=devices == 3, wire=gpu_runs.F32)


@pytest.mark.parametrize("devices", [2, 5])
def test_exchanges_over_nvlink(devices):
    for seed, order in enumerate(SCHEDULES[::12]):
        gpu_runs.ragged(order, devices=devices, seed=seed)
        gpu_runs.all_reduce(order, devices=devices)


# -- what the kernels refuse is what the compiler refuses


def refusal(function, *shapes) -> str | None:
    """Why the function cannot be lowered for a GPU."""
    try:
        jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    except Exception as error:  # of many kinds
        return f"{type(error).__name__}: {error}"
    return None


def check_problem(problem, tile):
    """What `gpu.unsupported` says is what the compiler says."""
    check(gpu.unsupported(problem, tile), functools.partial(gpu.run, tile=tile), problem)


def check(said, function, *shapes):
    """Both say yes, or both say no."""
    found = refusal(function, *shapes)
    assert bool(said) == (found is not None), f"we say {list(said)}, the compiler {found}"


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


ODD = [{"m": 1}, {"k": 12}, {"k": 72}, {"n": 4}, {"n": 72}, {"g": 7}, {"k": 40, "n": 40, "m": 5}]


@pytest.mark.parametrize(("odd", "major"), covering.each(ODD, [9, 10]), ids=str)
def test_grouped_matmul_accepts_shapes_that_compile(odd, major, monkeypatch):
    monkeypatch.setattr(gpu._compat, "gpu_architecture", lambda: (major, 0))
    m, k, n, g = ({"m": 128, "k": 128, "n": 128, "g": 2} | odd).values()
    narrow = "n" in odd
    for transposed, out in [(False, BF16), (True, F32)][: 1 + narrow]:
        lhs, rhs, sizes = struct(m, k), struct(g, *((n, k) if transposed else (k, n))), struct(g, dtype=jnp.int32)
        problem = MatmulProblem(lhs, (rhs,), sizes, transpose_rhs=transposed, out_dtype=out)
        tile = gpu.make_tile(gpu.with_tile(Config(), gpu.padded_sizes(problem)), 2, problem.key)
        check_problem(problem, tile)
        if not transposed:
            check_problem(TransposeProblem(lhs, struct(m, n), sizes, groups=g, out_dtype=out), tile)


@pytest.mark.parametrize(
    ("n", "transposed", "right"), [(32, False, True), (96, False, False), (12, True, False), (64, True, True)]
)
def test_columns_of_gate_and_up_are_where_a_copy_may_begin(n, transposed, right):
    rhs = struct(2, *((n, 64) if transposed else (64, n)))
    problem = MatmulProblem(struct(64, 64), (rhs, rhs), None, transpose_rhs=transposed, out_dtype=F32)
    tile = gpu.make_tile(gpu.with_tile(Config(), problem.key), 2, problem.key)
    assert (gpu.padded_sizes(problem) == problem.key) == right
    for module in gpu_runs.GROUPED.values():
        with contextlib.nullcontext() if right else pytest.raises(Fault, match="no multiple of the tile"):
            how = {"activation": "silu", "gated": True, "transpose_rhs": transposed, "tile": tile, "out": gpu_runs.F32}
            gpu_runs.matmul(module, [30, 34], rows=64, k=64, n=n, **how)


@pytest.mark.slow
@pytest.mark.parametrize("major", [9, 10])
def test_fused_matmuls_accept_shapes_that_compile(major, monkeypatch):
    monkeypatch.setattr(fused._compat, "gpu_architecture", lambda: (major, 0))
    mesh = jax.sharding.AbstractMesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    dtypes = {"out_dtype": BF16, "comm_dtype": F32}
    for odd in [{"rows": 20}, {"k": 40}, {"n": 72}]:
        rows, k, n = ({"rows": 64, "k": 64, "n": 64} | odd).values()
        for transposed in (False, True) if "n" in odd else (False,):
            x, w = struct(rows, k), struct(*((n, k) if transposed else (k, n)))
            order = fused.gather_order(rows, k, n, 4, 2)
            mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
            how = {"transposed": transposed, "out_dtype": BF16}
            gather = functools.partial(fused.all_gather_matmul, axis_name="a", order=order, **how)
            check(fused.unsupported(x, w, "a", order, **how), mapped(gather), x, w)
            order = fused.scatter_order(rows, k, n, 4, 2, **dtypes)
            how = {"transposed": transposed, **dtypes}
            scatter = functools.partial(fused.matmul_reduce_scatter, axis_name="a", order=order, **how)
            check(fused.unsupported(x, w, "a", order, **how), mapped(scatter), struct(4 * rows, k), w)
