"""What `device_seconds` measures where there is no CUPTI: positive, by the loop, and of every result."""

import jax
import jax.numpy as jnp
import pytest

from meshpar_kernels import timing


def test_a_loop_times_a_call_on_a_cpu(monkeypatch):
    """And the call runs as often as the loop says: its results are not hoisted out of it."""
    monkeypatch.setattr(timing, "LOOP_SECONDS", 0.01)
    calls = []

    def function(x, y):
        jax.debug.callback(lambda: calls.append(1))
        return x @ y, (x + y).sum()

    x = jnp.ones((16, 16))
    seconds, method = timing.device_seconds(function, [x, x])
    jax.effects_barrier()
    assert method == "loop"
    assert seconds > 0
    assert len(calls) >= 2 * 2 + 5 * (6 + 2)


def test_an_error_of_the_function_is_raised():
    with pytest.raises(TypeError, match="no"):
        timing.device_seconds(lambda x: (_ for _ in ()).throw(TypeError("no")), [jnp.ones(2)])
