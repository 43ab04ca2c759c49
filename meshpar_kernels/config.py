"""How a kernel runs: the configuration that a caller gives, and checks of the functions that take one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel runs: its tiles, stages and blocks. No field changes the result, besides rounding.

    A field that is None is chosen: by the tuning table's entry for the matmul on the device, else by a rule.

    Attributes:
      tile: (rows, K, N) of a step. By rule: the tile that moves the fewest bytes.
      stages: of the GPU kernel's shared memory. By rule: as many as fit, at most 6.
      num_sms: thread blocks of the GPU kernel's grid, each of which has a multiprocessor for itself. By rule: the number of
        multiprocessors (of a kernel over NVLink: 32 fewer).
      cluster: 2: clusters of two thread blocks of the GPU kernel. On Hopper they compute adjacent tiles, and TMA multicast
        loads their common operand once; if the number of column tiles is odd, the last one is paired with an empty tile. On
        Blackwell their tensor cores compute a tile of 256 rows together ("2-CTA"), of a multiple of 128 columns. By rule:
        1, no clusters.
      pingpong: Hopper's `grouped_matmul_transpose` only: each of a block's two multiplying warpgroups computes a tile of its
        own, at most 128 columns wide, and one multiplies while the other writes. It is for groups of few rows, for which a
        tile is written after few matmuls. By rule: False.

    Raises:
      ValueError: a number that is no integer of at least 1, or a tile that is not three of them.
    """

    tile: tuple[int, int, int] | None = None
    stages: int | None = None
    num_sms: int | None = None
    cluster: int | None = None
    pingpong: bool | None = None

    def __post_init__(self) -> None:
        """Check the fields, and make a list of sizes a tuple."""
        if self.tile is not None:
            object.__setattr__(self, "tile", tuple(self.tile))
            if len(self.tile) != 3 or not all(_is_count(size) for size in self.tile):
                raise ValueError(f"tile={self.tile} must be (rows, K, N), integers of at least 1")
        for name in ("stages", "num_sms", "cluster"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if not isinstance(self.pingpong, bool | None):
            raise ValueError(f"pingpong={self.pingpong!r} must be True or False")

    def given(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def over(self, base: Config) -> Config:
        """This configuration, with the fields of `base` where this one has None."""
        return dataclasses.replace(base, **self.given())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def keywords_in_config(*names: str) -> Callable[[Function], Function]:
    """Decorator of a function with the keyword `config`: keywords with these names, which are fields of it, raise TypeError
    with the `config=` to write."""

    def decorate(function: Function) -> Function:
        """The function, with the check."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Check the keywords, and call the function."""
            found = [name for name in names if name in kwargs]
            if found:
                fields = ", ".join(f"{name}={kwargs[name]!r}" for name in found)
                raise TypeError(
                    f"{function.__name__}: {' and '.join(found)} {'are fields' if found[1:] else 'is a field'} of config: "
                    f"config=Config({fields}), with meshpar_kernels.Config"
                )
            return function(*args, **kwargs)

        return cast("Function", call)

    return decorate


def only_num_sms(op: str, config: Config | None) -> int | None:
    """`config.num_sms`, for a function that chooses the other fields itself.

    Raises:
      ValueError: the config has other fields.
    """
    config = config or Config()
    if others := config.given().keys() - {"num_sms"}:
        raise ValueError(f"{op}: config has {', '.join(sorted(others))}; num_sms is the only field that can be set")
    return config.num_sms
