"""Seconds of copies between device and host memory, what hides them, and the memory of loops that update their carry in place."""

import json

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.cost.schedule import schedules
from meshpar._src.report import plan_page
from meshpar._src.report.timeline import step_bounds
from meshpar._src.units import format_bytes, format_seconds

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
F32 = 4
GB = 1_000_000_000


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def plan(fn, *args, topology="v5e:2x2", **kwargs):
    return mp.plan(fn, *args, mesh="data=4", topology=topology, layout="rows: data", dims={"x": "rows _"}, **kwargs)


def there(x):
    return jax.device_put(x, HOST)


def back(x):
    return jax.device_put(x, DEVICE)


@pytest.mark.parametrize(("topology", "seconds"), [("v5e:2x2", 1 / 15), ("v6e:2x2", 1 / 32), ("h100:4", 1 / 64)])
def test_a_gigabyte_takes_as_long_as_the_link_to_the_host(topology, seconds):
    x = array(4 * 1000, GB // 1000 // F32)
    copied, plain = (plan(f, x, topology=topology) for f in (lambda x: there(x * 2), lambda x: x * 2))
    assert copied.time.to_host == pytest.approx(seconds)
    assert copied.time.to_device == 0.0
    assert copied.seconds - plain.seconds == pytest.approx(seconds)
    assert copied.time.overlapped == pytest.approx(seconds)
    assert dict(step_bounds(copied))["copies to and from the host"] == pytest.approx(seconds)
    facts = json.loads(copied.to_json())
    assert facts["time"]["to_host"] == copied.time.to_host
    assert plain.time.to_host == 0.0


def test_a_copy_is_hidden_by_kernels_that_do_not_read_it():
    x, w = array(4 * 4096, 4096), array(4096, 4096)

    def needed_last(x, w):
        y = back(there(x))
        z = x
        for _ in range(40):
            z = jnp.tanh(z @ w)
        return y + z

    def needed_first(x, w):
        z = back(there(x))
        for _ in range(40):
            z = jnp.tanh(z @ w)
        return z

    hidden, exposed = (plan(f, x, w) for f in (needed_last, needed_first))
    both = F32 * 4096 * 4096 / 1.5e10 * 2
    assert exposed.seconds - hidden.seconds == pytest.approx(both, rel=0.1)
    assert hidden.time.to_host + hidden.time.to_device == pytest.approx(both)


def test_copies_of_a_loop_count_with_its_iterations():
    def fn(x, w):
        def layer(x, w):
            y = jnp.tanh(x @ w)
            return y, there(y)

        return jax.lax.scan(layer, x, w)

    made = plan(fn, array(4 * 1024, 512), array(8, 512, 512))
    assert made.time.to_host == pytest.approx(8 * F32 * 1024 * 512 / 1.5e10)
    (body,) = [s for s in schedules(made).values() if s.host_copies]
    (copy,) = body.host_copies
    assert copy.to_host
    assert body.seconds == pytest.approx(copy.end)
    assert made.seconds >= made.time.to_host


def test_reports_have_the_host():
    made = plan(lambda x: there(x * 2), array(4 * 1024, 1024))
    size = F32 * 1024 * 1024
    assert made.memory.host == size
    text = " ".join(str(made).split())
    assert f"a step copies {format_bytes(size)} to the host ({format_seconds(size / 1.5e10)})" in text
    page = plan_page(made)
    assert "in the host's memory per device" in page
    assert "copies to the host alone" in page
