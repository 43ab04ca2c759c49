"""Safetensors files that are damaged, missing or cannot be written."""

import contextlib
import json

import numpy as np
import pytest

pytest.importorskip("safetensors")
from safetensors.numpy import save

from meshpar._src.pods.foreign import _errors_of, _opened
from meshpar.errors import CheckpointError


def test_damaged_bytes(tmp_path):
    rng = np.random.default_rng(0)
    content = save({f"layer.{k}": rng.normal(size=(3, 4)).astype(np.float32) for k in range(3)})
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    files = [b"", content[:5], content[:-1], content + b"x", rng.bytes(100)]
    for _ in range(60):  # the header, with a length that fits
        at = int(rng.integers(8, 8 + length))
        files.append(content[:at] + rng.bytes(1) + content[at + 1 :])
    for offsets in ([0, 1], [10**30, 10**30], [-1, 47], "all", None):
        text = json.dumps({**header, "layer.0": {**header["layer.0"], "data_offsets": offsets}}).encode()
        files.append(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refused = 0
    for data in files:
        (tmp_path / "w.safetensors").write_bytes(data)
        with contextlib.suppress(CheckpointError):
            tensors = _opened(tmp_path)
            refused -= 1
            for name, file in tensors.items():
                file.get_slice(name)[:]
        refused += 1
    assert refused > 20


def test_a_folder_that_does_not_exist(tmp_path):
    from safetensors.numpy import save_file

    file = tmp_path / "none" / "w.safetensors"
    with pytest.raises(CheckpointError, match=r"none/w\.safetensors: "), _errors_of(file):
        save_file({"x": np.ones(3)}, file)
