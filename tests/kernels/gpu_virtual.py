"""A Mosaic GPU kernel that writes to other GPUs, interpreted as one device of several: without the others, and without waiting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from interpreters import gpu_race_detection

from meshpar_kernels import _compat
from meshpar_kernels._nvlink import DeviceGroup

__all__ = ["run"]


class OneOfSeveral:
    """Mosaic GPU for one device of several. What it sends to the others lands in a result of its own, by receiver, and what they
    sent is there from the start: the interpreter has no memory of others and no semaphores."""

    def __init__(self, devices: int, came: jax.Array):
        self.real, self.devices, self.came = _compat.mosaic_gpu(), devices, came
        self.outbox: Any = None
        self.sent: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def remote_ref(self, came: Any, device: dict[str, Any]) -> Any:
        return self.outbox.at[device["a"]]

    def kernel(self, body: Any, *, out_type: Any, **options: Any) -> Any:
        out, buffer = out_type
        outbox = jax.ShapeDtypeStruct((self.devices, *buffer.shape), buffer.dtype)

        def call(*args: jax.Array) -> Any:
            def one(*refs: Any) -> None:
                inputs, (came, out, self.outbox), scratch = (
                    refs[: len(args)],
                    refs[len(args) :][:3],
                    refs[len(args) + 3 :],
                )
                body(*inputs, out, came, *scratch)

            found = self.real.kernel(one, out_type=[out, outbox], **options)(*args, self.came)
            self.sent = found[1]
            return found

        return call


class Uncounted:
    """Counts that nobody looks at."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.at = shape, self

    def __getitem__(self, index: Any) -> None:
        return None


def run(monkeypatch: Any, rank: int, devices: int, came: jax.Array, function: Any, *args: Any, **options: Any) -> Any:
    """(result of the function, what this device sent, by receiver), with what the others have sent."""
    from jax.experimental import pallas as pl

    virtual = OneOfSeveral(devices, came)
    with gpu_race_detection(), monkeypatch.context() as patch:
        patch.setattr(_compat, "mosaic_gpu", lambda: virtual)
        patch.setattr(DeviceGroup, "of", lambda axes, sizes: DeviceGroup(axes, sizes, jnp.int32(rank), {}))
        patch.setattr(pl, "get_global", lambda counts: Uncounted(counts.shape))
        for name in ("semaphore_wait", "semaphore_signal"):
            patch.setattr(pl, name, lambda *_, **__: None)
        return jax.block_until_ready((function(*args, **options), virtual.sent))
