"""Which implementation None is: the rule, the variable that changes it, and machines whose GPUs a kernel cannot join."""

import contextlib
import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from kernel_cases import lowered

from meshpar_kernels import (
    _choose,
    _compat,
    all_gather_matmul,
    all_reduce_small,
    combine,
    grouped_matmul,
    permute,
    ragged_all_to_all,
    reduce_scatter,
    route,
)
from meshpar_kernels._nvlink import machine_reasons

BF16 = jnp.bfloat16


def matmuls(lhs, rhs, sizes):
    return grouped_matmul(lhs, rhs, sizes)


def routing(logits, x):
    plan = route(logits, 2)
    return combine(permute(x, plan), plan, weight=plan.weight)


def structs(*shapes, dtype=BF16):
    """Arrays of rows and weights, and the sizes of groups."""
    return [*(jax.ShapeDtypeStruct(s, dtype) for s in shapes), jax.ShapeDtypeStruct((shapes[-1][0],), jnp.int32)]


MATMUL_CASE = structs((128, 64), (2, 64, 64))
ROUTING_CASE = jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((16, 64), BF16)


@pytest.mark.parametrize(
    ("value", "product_kernels", "routing_kernels"),
    [(None, True, False), ("pallas", True, True), ("reference", False, False)],
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_kernel_is_a_default_only_where_the_rule_says_so(value, product_kernels, routing_kernels, monkeypatch):
    if value is None:
        monkeypatch.delenv(_choose.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(_choose.VARIABLE, value)
    jax.clear_caches()
    assert ("mosaic_gpu" in lowered(matmuls, *MATMUL_CASE)) == product_kernels
    assert (lowered(routing, *ROUTING_CASE).count("triton") >= 3) == routing_kernels
    jax.clear_caches()


def test_where_a_platform_has_no_kernel_for_the_operands_the_loop_runs():
    for platform, dtype, kernel in (("tpu", BF16, True), ("cpu", BF16, False), ("cuda", jnp.float32, False)):
        text = lowered(grouped_matmul, *structs((16, 128), (1, 128, 128), dtype=dtype), platform=platform)
        assert ("tpu_custom_call" in text or "mosaic_gpu" in text) == kernel, platform
        assert ("stablehlo.while" in text) == (not kernel), platform


def test_by_name_the_variable_does_not_matter(monkeypatch):
    monkeypatch.setenv(_choose.VARIABLE, "reference")
    assert "mosaic_gpu" in lowered(lambda *a: grouped_matmul(*a, implementation="pallas"), *MATMUL_CASE)


def test_another_value_is_an_error(monkeypatch):
    monkeypatch.setenv(_choose.VARIABLE, "mosaic")
    with pytest.raises(ValueError, match="MESHPAR_KERNELS='mosaic': it may be 'pallas' or 'reference'"):
        grouped_matmul(jnp.zeros((8, 64)), jnp.zeros((2, 64, 64)), jnp.asarray([3, 5]))


@pytest.mark.parametrize(("platform", "count"), [("tpu", 1), ("cuda", 0)])
def test_a_default_that_no_device_has_timed_is_logged_once(monkeypatch, caplog, platform, count):
    monkeypatch.delenv(_choose.VARIABLE, raising=False)
    monkeypatch.setattr(_compat, "backend_platform", lambda: platform)
    _choose._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(matmuls, *MATMUL_CASE)
    messages = [r.getMessage() for r in caplog.records if "is the default" in r.getMessage()]
    assert len(messages) == count
    assert all(m.startswith("grouped_matmul: the Pallas kernel is the default, since lax.ragged_dot") for m in messages)


def test_a_kernel_is_the_default_on_its_platforms_alone(monkeypatch):
    monkeypatch.delenv(_choose.VARIABLE, raising=False)
    assert set(_choose.by_default("grouped_matmul")) == {"cuda", "tpu"}
    assert set(_choose.by_default("scaled_grouped_matmul")) == {"cuda"}
    assert set(_choose.by_default("route")) == set()
    monkeypatch.setenv(_choose.VARIABLE, "pallas")
    assert set(_choose.by_default("route")) == {"cuda", "tpu"}


def test_the_mesh_says_which_gpu():
    """Without one, Hopper is assumed: as JAX does, when it lowers for a GPU on a machine that has none."""
    kinds = {
        "": (9, 132),
        "NVIDIA H20": (9, 78),
        "NVIDIA H100 PCIe": (9, 114),
        "NVIDIA H200": (9, 132),
        "NVIDIA B200": (10, 148),
    }
    for kind, (major, count) in (kinds | {"TPU v5e": (9, 132)}).items():
        device = jax.sharding.AbstractDevice(kind, 1, "gpu") if kind else None
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            assert _compat.gpu_architecture() == (major, 0), kind
            assert _compat.multiprocessors() == count, kind


def mesh_of(*places):
    """Of GPUs with these ids and processes, [2, 2]."""
    devices = np.array([types.SimpleNamespace(id=i, process_index=p, slice_index=p) for i, p in places]).reshape(2, 2)
    return types.SimpleNamespace(empty=False, axis_names=("host", "gpu"), devices=devices, shape={"host": 2, "gpu": 2})


def test_axes_that_cross_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(_compat, "backend_platform", lambda: "cuda")
    two_hosts = mesh_of((0, 0), (1, 0), (2, 1), (3, 1))
    monkeypatch.setattr(_compat._mesh, "get_concrete_mesh", lambda: two_hosts)
    assert machine_reasons(2, ("gpu",)) == []
    (reason,) = machine_reasons(2, ("host",))
    joined = {True: "machines [0, 1]; NVLink joins", False: "processes [0, 1]; kernels join"}
    assert joined[jax.__version_info__ >= (0, 11, 2)] in reason
    monkeypatch.setattr(_compat._mesh, "get_concrete_mesh", lambda: mesh_of((0, 0), (2, 0), (1, 0), (3, 0)))
    (reason,) = machine_reasons(2, ("gpu",))
    assert "in the order [0, 2, 1, 3]; the kernel needs the order of their ids" in reason
    monkeypatch.setattr(_compat._mesh, "get_concrete_mesh", lambda: types.SimpleNamespace(empty=True))
    assert machine_reasons(2, ("gpu",)) == []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    (reason,) = machine_reasons(2, ("gpu",))
    assert "2 processes, and no jax.set_mesh(mesh) says which devices" in reason


def test_processes_of_one_machine_are_joined_from_jax_0_11_2_on(monkeypatch):
    monkeypatch.setattr(_compat, "backend_platform", lambda: "cuda")
    mesh = mesh_of((0, 0), (1, 1), (2, 2), (3, 3))
    for device in mesh.devices.flat:
        device.slice_index = 0
    monkeypatch.setattr(_compat._mesh, "get_concrete_mesh", lambda: mesh)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert machine_reasons(2, ("gpu",)) == []
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    (reason,) = machine_reasons(2, ("gpu",))
    assert "processes [0, 1]; kernels join the GPUs of one process up to jax 0.11.1" in reason


def test_an_allocator_without_shared_memory_is_refused(monkeypatch):
    monkeypatch.setattr(_compat, "backend_platform", lambda: "cuda")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    (reason,) = machine_reasons(2, ("gpu",))
    assert "XLA_PYTHON_CLIENT_ALLOCATOR=platform allocates no memory that other GPUs can write to" in reason
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "bfc")
    assert machine_reasons(2, ("gpu",)) == []


def test_a_refused_kernel_is_said_once(monkeypatch, caplog):
    monkeypatch.delenv(_choose.VARIABLE, raising=False)
    monkeypatch.setattr(_compat, "backend_platform", lambda: "cuda")
    _choose._say_refused.cache_clear()
    operands = structs((8, 64), (2, 64, 64), dtype=jnp.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(lambda a, b, c: grouped_matmul(a, b, c), *operands)
    said = [r.getMessage() for r in caplog.records if "cannot run these arguments" in r.getMessage()]
    assert len(said) == 1
    assert "'xla' runs instead: operands are float32" in said[0]


P = jax.sharding.PartitionSpec
REMOTE = {
    "all_reduce_small": lambda x: all_reduce_small(x, "slice"),
    "reduce_scatter": lambda x: reduce_scatter(x, "slice", implementation="pallas"),
    "ragged_all_to_all": lambda x: ragged_all_to_all(
        x, x, *[jnp.zeros(lax.axis_size("slice"), jnp.int32)] * 4, axis_name="slice", implementation="pallas"
    )[0],
    "all_gather_matmul": lambda x: all_gather_matmul(x, jnp.ones((128, 128)), "slice"),
}


@pytest.mark.parametrize("op", REMOTE)
def test_remote_dma_does_not_leave_a_slice(op, monkeypatch):
    """Of a mesh of two slices: refused when lowered, or, with `jax.set_mesh`, while traced: then None selects another
    implementation. Within a slice the same program is lowered."""
    monkeypatch.setenv(_choose.VARIABLE, "pallas")
    monkeypatch.setattr(_compat, "_slice_index", lambda device: device.id // 4)
    devices = np.array(jax.devices()[:8])
    x = jnp.ones((64, 128))

    def lowered(mesh, lower=True):
        function = jax.shard_map(REMOTE[op], mesh=mesh, in_specs=P(), out_specs=P("slice"), check_vma=False)
        traced = jax.jit(function).trace(x)
        return traced.lower(lowering_platforms=("tpu",)).as_text() if lower else str(traced.jaxpr)

    inside = jax.sharding.Mesh(devices.reshape(2, 4)[:1], ("a", "slice"))
    assert "tpu_custom_call" in lowered(inside)
    across = jax.sharding.Mesh(devices.reshape(2, 4), ("slice", "b"))
    with pytest.raises(NotImplementedError, match=r"'slice' joins the slices \[0, 1\]; remote DMA uses ICI"):
        lowered(across)
    with jax.set_mesh(across):
        if op in ("reduce_scatter", "ragged_all_to_all"):
            with pytest.raises(NotImplementedError, match="which does not leave a slice"):
                lowered(across)
        else:
            assert "pallas_call" not in lowered(across, lower=False)


@pytest.mark.parametrize(("kind", "refused"), [("TPU v4", True), ("TPU v5p", True), ("TPU v5 lite", False)])
def test_fused_matmuls_refuse_chips_with_two_tensor_cores(kind, refused):
    device = jax.sharding.AbstractDevice(kind, 2, "tpu")
    mesh = jax.sharding.AbstractMesh((8,), ("a",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    call = functools.partial(all_gather_matmul, axis_name="a", implementation="pallas_tpu")
    function = jax.shard_map(call, mesh=mesh, in_specs=(P("a"), P()), out_specs=P(), check_vma=False)
    error = pytest.raises(NotImplementedError, match="2 TensorCores; the kernel multiplies on one")
    with error if refused else contextlib.nullcontext():
        jax.eval_shape(function, jnp.ones((1024, 128)), jnp.ones((128, 128)))
