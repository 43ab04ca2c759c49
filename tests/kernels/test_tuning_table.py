"""The tuning table and the tuner, with injected times: stored and rejected configurations, and their readers."""

import contextlib
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from kernel_cases import lowered, mesh_of, on_devices
from rich.console import Console

from meshpar._src.entry import cli
from meshpar._src.entry.tune_kernels import matmul_keys, tune_matmuls
from meshpar.errors import CheckError, TargetError
from meshpar_kernels import (
    _compat,
    all_gather_matmul,
    grouped_matmul,
    grouped_matmul_transpose,
    matmul_reduce_scatter,
    scaled_grouped_matmul,
    tuning_table,
)
from meshpar_kernels.config import Config
from meshpar_kernels.grouped_matmul import gpu, hopper, tuner
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem
from meshpar_kernels.isolation import Worker
from meshpar_kernels.tuning_table import MatmulKey

PRODUCT = MatmulKey("grouped_matmul", 8192, 2048, 2048, 64)
ANALYTIC, FAST, WRONG, BROKEN = (Config((128, 64, n), 4) for n in (256, 128, 64, 192))


def bench_of(seconds, errors=None):
    """A bench with these times and errors by choice; those that are exceptions are raised."""

    def bench(config):
        found = (errors or {}).get(config, 1e-3)
        if isinstance(found, Exception):
            raise found
        return found, seconds.get(config, [])

    return bench


def test_the_median_decides_among_what_is_right():
    """One slow call of five does not; a wrong or NaN result is not timed, however fast it would be; a refusal is a reason."""
    nan = Config((128, 128, 64), 2)
    bench = bench_of(
        {ANALYTIC: [2.0, 2.1, 2.2, 2.0, 2.1], FAST: [1.0, 1.1, 9.0, 9.0, 1.0]},
        {WRONG: 0.5, nan: math.nan, BROKEN: NotImplementedError("does not fit")},
    )
    got = tuner.tune(bench, [ANALYTIC, WRONG, nan, BROKEN, FAST], limit=1e-2)
    assert got.entry == tuning_table.Entry(FAST, 1.1, 2.1, jax.__version__)
    assert got.seconds == {ANALYTIC: 2.1, FAST: 1.1}
    assert got.wrong.keys() == {WRONG, nan}
    assert got.refused == {BROKEN: "NotImplementedError: does not fit"}


def test_within_the_noise_the_analytic_choice_stays():
    bench = bench_of({ANALYTIC: [1.0], FAST: [0.99]})
    assert tuner.tune(bench, [ANALYTIC, FAST], limit=1e-2).entry.config == ANALYTIC


def problem(sizes: MatmulKey, dtype=jnp.bfloat16):
    """The matmul, or the transpose, of these sizes."""
    dtype = jnp.dtype(dtype)
    lhs, columns = (jax.ShapeDtypeStruct((sizes.rows, size), dtype) for size in (sizes.k, sizes.n))
    if sizes.transposes:
        return TransposeProblem(lhs, columns, None, groups=sizes.groups, out_dtype=dtype)
    shape = (sizes.n, sizes.k) if sizes.transposed else (sizes.k, sizes.n)
    rhs = jax.ShapeDtypeStruct((sizes.groups, *shape), dtype)
    return MatmulProblem(lhs, (rhs,) * sizes.matrices, None, transpose_rhs=sizes.transposed, out_dtype=dtype)


@pytest.mark.parametrize(("platform", "major"), [("cuda", 9), ("cuda", 10), ("tpu", 9)])
@pytest.mark.parametrize("product", list(matmul_keys(["g64", "deepseek-v3-up"])), ids=lambda p: p.shape_class)
def test_candidates_begin_with_the_analytic_choice_and_fit(product, platform, major, monkeypatch):
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: (major, 0))
    found = tuner.candidates(product, "bfloat16", platform)
    assert 4 < len(found) == len(set(found)) < 64
    for config in found:
        assert len(config.tile) == 3
        if platform == "cuda":
            tile = gpu.make_tile(config, 2, product)
            assert not gpu.unsupported(problem(product), tile)
            own = tile.n // tile.cluster if major == 10 else tile.n
            assert tile.stages * (tile.m + own * product.matrices) * tile.k * 2 <= gpu.SMEM_BYTES
    if platform == "cuda":
        assert {c.cluster for c in found} == {None, 2}
        assert any(c.pingpong for c in found) == (product.op == "grouped_matmul_transpose" and major == 9)


def entry(config):
    return tuning_table.Entry(config, 1e-3, 2e-3, "0.10.2")


def test_a_table_is_read_as_it_was_written_and_the_users_wins(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "table.json"
    one = {"NVIDIA H200": {PRODUCT.shape_class: {"bfloat16": entry(FAST)}}}
    tuning_table.write(file, one)
    assert tuning_table.read(file) == one
    other = {"NVIDIA H200": {PRODUCT.shape_class: {"bfloat16": entry(ANALYTIC), "float16": entry(FAST)}}, "TPU v5p": {}}
    merged = tuning_table.merge(other, tuning_table.read(file))
    assert merged["NVIDIA H200"][PRODUCT.shape_class] == {"bfloat16": entry(FAST), "float16": entry(FAST)}
    tuning_table.write(file, merged)
    monkeypatch.setenv(tuning_table.VARIABLE, str(file))
    monkeypatch.setattr(_compat, "device_kind", lambda: "NVIDIA H200")
    near = MatmulKey("grouped_matmul", 9000, 2048, 2048, 60)
    assert tuning_table.lookup("cuda", near, jnp.bfloat16) == FAST
    assert tuning_table.lookup("cuda", near, jnp.float32) is None
    assert (
        tuning_table.lookup("cuda", MatmulKey("grouped_matmul", 8192, 2048, 2048, 64, transposed=True), "bfloat16")
        is None
    )
    assert tuning_table.lookup("tpu", near, jnp.bfloat16) is None
    monkeypatch.setattr(_compat, "device_kind", lambda: "NVIDIA B200")
    assert tuning_table.lookup("cuda", near, jnp.bfloat16) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_sms": 0}, "num_sms=0 must be an integer of at least 1"),
        ({"stages": True}, "stages=True must be"),
        ({"tile": (128, 64)}, r"tile=\(128, 64\) must be \(rows, K, N\)"),
        ({"tile": [128, 0, 64]}, r"tile=\(128, 0, 64\) must be"),
        ({"pingpong": 1}, "pingpong=1 must be True or False"),
    ],
)
def test_a_config_with_a_wrong_field(fields, words):
    with pytest.raises(ValueError, match=words):
        Config(**fields)


def test_a_config_is_completed_field_by_field():
    assert Config(stages=2).over(FAST) == Config(FAST.tile, 2)
    assert Config([8, 8, 8], num_sms=3).given() == {"tile": (8, 8, 8), "num_sms": 3}
    assert {Config([8, 8, 8]): 1}[Config((8, 8, 8))] == 1


def test_keywords_that_are_fields_of_the_config_name_it():
    x, sizes = jnp.ones((8, 8)), jnp.asarray([8])
    for call, words in (
        (
            lambda: grouped_matmul(x, x[None], sizes, num_sms=3, cluster=2),
            r"grouped_matmul: num_sms and cluster are fields of config: config=Config\(num_sms=3, cluster=2\)",
        ),
        (lambda: grouped_matmul_transpose(x, x, sizes, pingpong=True), r"config=Config\(pingpong=True\)"),
        (lambda: scaled_grouped_matmul(x, x, x, x, sizes, num_sms=3), r"config=Config\(num_sms=3\)"),
        (lambda: all_gather_matmul(x, x, "a", num_sms=3), r"all_gather_matmul: num_sms is a field of config"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    for op in (all_gather_matmul, matmul_reduce_scatter):
        call = functools.partial(op, axis_name="a", config=Config(stages=3))
        with pytest.raises(ValueError, match="config has stages; num_sms is the only field"):
            on_devices(call, mesh_of(1), x[None], x[None])


def test_path_of_the_users_table(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuning_table.VARIABLE, raising=False)
    assert tuning_table.path() == tmp_path / "meshpar" / "kernels.json"
    monkeypatch.setenv(tuning_table.VARIABLE, "here.json")
    assert str(tuning_table.path()) == "here.json"


def table_of(fields):
    return json.dumps({"format": 1, "devices": {"a": {"b": {"c": fields}}}})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"format": 2, "devices": {}}',
        table_of({"tile": [1, 0, 2]}),
        table_of({"tile": [1, 1, 1], "pingpong": 2, "seconds": 1, "analytic_seconds": 1, "jax": ""}),
        "[]",
    ],
)
def test_a_file_that_is_no_table_is_said(text, tmp_path):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json is no tuning table"):
        tuning_table.read(file)


def test_kernels_can_take_what_is_shipped(monkeypatch):
    """Every entry is faster than the analytic choice, and names a tile that the kernel accepts."""
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: (9, 0))
    table = tuning_table.read(tuning_table.SHIPPED)
    assert set(table) == {"NVIDIA H200"}
    for shape, dtypes in table["NVIDIA H200"].items():
        sizes = {name: int(size) for name, _, size in (word.partition("=") for word in shape.split()) if size}
        product = MatmulKey("grouped_matmul_transpose", 8, sizes["K"], sizes["N"], 1)
        for dtype, entry in dtypes.items():
            assert entry.seconds < tuner.MARGIN * entry.analytic_seconds
            assert shape.startswith("grouped_matmul_transpose ")
            tile = gpu.make_tile(entry.config, jnp.dtype(dtype).itemsize, product)
            assert not [r for r in gpu.unsupported(problem(product, dtype), tile) if "imported" not in r]


@pytest.mark.slow
def test_the_kernel_uses_the_table_unless_the_caller_gives_a_tile(monkeypatch, tmp_path):
    """And what does not fit, since the kernel has changed, is as if it were not there."""
    seen = []

    def kernel(problem, *, tile, num_sms):
        seen.append((tile, num_sms))
        return jnp.zeros(problem.out_shape, problem.out_dtype)

    monkeypatch.setattr(hopper, "grouped_matmul", kernel)
    monkeypatch.setattr(_compat, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setenv(tuning_table.VARIABLE, str(tmp_path / "table.json"))
    arguments = jnp.zeros((256, 128), jnp.bfloat16), jnp.zeros((2, 128, 512), jnp.bfloat16), jnp.asarray([128, 128])
    product = MatmulKey("grouped_matmul", 256, 128, 512, 2)

    def taken(config=None, **requested):
        entries = {product.shape_class: {"bfloat16": entry(config)}} if config else {}
        tuning_table.write(tmp_path / "table.json", {"NVIDIA H200": entries})
        jax.clear_caches()
        lowered(lambda *a: grouped_matmul(*a, implementation="pallas_gpu", config=Config(**requested)), *arguments)
        return seen[-1]

    analytic = taken()
    assert analytic == (gpu.Tile(128, 256, 64, 4), 132)
    measured, clustered = Config((128, 128, 64), 3, 100), Config((128, 64, 64), 3, cluster=2)
    assert taken(measured) == (gpu.Tile(128, 64, 128, 3), 100)
    assert taken(measured, num_sms=7) == (gpu.Tile(128, 64, 128, 3), 7)
    assert taken(measured, tile=(128, 64, 128))[0] == gpu.make_tile(Config((128, 64, 128)), 2, product)
    assert taken(measured, stages=2)[0].stages == 2
    assert taken(clustered)[0] == gpu.Tile(128, 64, 64, 3, 2)
    assert taken(clustered, cluster=1)[0].cluster == 1
    assert taken(cluster=2)[0] == analytic[0]._replace(cluster=2)
    for unfit in (Config((64, 64, 64), 3), Config((128, 64, 256), 9)):
        assert taken(unfit) == analytic
    with pytest.raises(NotImplementedError, match="9 stages: the kernel takes 2 to 4 of tile"):
        taken(stages=9)


# -- the command


def test_the_command_extends_the_file_and_shows_what_it_found(tmp_path):
    file = tmp_path / "table.json"
    tuning_table.write(file, {"TPU v5p": {"x": {"float32": entry(ANALYTIC)}}})
    wanted = list(matmul_keys(["rows=1024, k=256, n=512, groups=4"]))
    assert [p.shape_class.split(" ", 1)[0] for p in wanted] == ["grouped_matmul"] * 3 + ["grouped_matmul_transpose"]
    console = Console(width=200, record=True, quiet=True)

    def bench(product):
        choices = tuner.candidates(product, "bfloat16", "cuda")
        seconds = {c: [1e-3 * (9 - i % 5)] for i, c in enumerate(choices)}
        return contextlib.nullcontext(bench_of(seconds, {choices[4]: 1.0}))

    found = tune_matmuls(wanted, "bfloat16", "cuda", "NVIDIA H200", bench, file, console)
    assert set(tuning_table.read(file)) == {"TPU v5p", "NVIDIA H200"}
    assert tuning_table.read(file)["NVIDIA H200"] == found["NVIDIA H200"]
    for product in wanted:
        choices = tuner.candidates(product, "bfloat16", "cuda")
        got = found["NVIDIA H200"][product.shape_class]["bfloat16"]
        assert got.config in choices
        assert got.config != choices[4]
        assert got.seconds < got.analytic_seconds


def test_a_wrong_kernel_stores_nothing(tmp_path):
    def bench(product):
        return contextlib.nullcontext(bench_of({}, {tuner.candidates(product, "bfloat16", "cuda")[0]: 0.3}))

    with pytest.raises(CheckError, match=r"on NVIDIA H200: .* is wrong by 0\.3"):
        tune_matmuls([PRODUCT], "bfloat16", "cuda", "NVIDIA H200", bench, tmp_path / "t.json", Console(quiet=True))
    assert not (tmp_path / "t.json").exists()


def test_without_an_accelerator_the_command_says_so(capsys):
    assert cli.main(["tune-kernels", "--shape", "g64"]) == 2
    assert "JAX finds no TPU and no NVIDIA GPU here" in capsys.readouterr().err


def test_the_command_lists_what_there_is(tmp_path, capsys, monkeypatch):
    file = tmp_path / "t.json"

    def listed(status=0):
        assert cli.main(["tune-kernels", "--list", "--table", str(file)]) == status
        return "".join(capsys.readouterr())

    assert "H200" in listed()  # what is shipped
    monkeypatch.setattr(tuning_table, "SHIPPED", tmp_path / "none.json")
    assert "No tile was measured yet" in listed()
    tuning_table.write(file, {"NVIDIA H200": {PRODUCT.shape_class: {"bfloat16": entry(FAST)}}})
    assert "H200" in listed()
    file.write_text("{}")
    assert "is no tuning table" in listed(status=2)


@pytest.mark.parametrize("text", ["g65", "rows=8, k=2", "rows=8, k=2, n=0, groups=1"])
def test_a_shape_that_is_none(text):
    with pytest.raises(TargetError, match="no shape"):
        list(matmul_keys([text]))


def test_a_configuration_that_crashes_its_process_is_refused(monkeypatch):
    """And costs itself alone: the next one is measured in a new process."""
    here = str(Path(__file__).parent)
    monkeypatch.setattr(tuner, "Worker", lambda target: Worker("isolated_calls:measure", paths=[here]))
    with tuner.isolated_bench(PRODUCT, "bfloat16", limit=60) as bench:
        got = tuner.tune(bench, [ANALYTIC, BROKEN, WRONG, FAST], limit=tuner.limit_of("bfloat16"))
    assert got.entry.config == FAST
    assert got.seconds == {ANALYTIC: 2e-3, FAST: 1e-3}
    assert got.wrong == {WRONG: 0.5}
    assert "SIGABRT" in got.refused[BROKEN]
