"""Weights of others: safetensors read by dims, each process reading the slices of its own devices; and written."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...errors import CheckpointError, LayoutSyntaxError, RankError, UnsupportedError
from ..dims import did_you_mean, format_dims, path_matches
from ..global_arrays import fetch, of_parts
from ..low_rank_adapters import Adapter
from .checkpoint import facts_of, needed, read_leaves
from .state_by_name import by_name

Rules = Mapping[str, tuple[str, str]]
"""Name of a tensor there → (path here, its dims there): ``"h.{layers}.attn.q.weight": ("layers/q", "(heads head_dim) embed")``."""

_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_STACKED = re.compile(r"\{(\w+)\}")


@contextlib.contextmanager
def _errors_of(file: str | Path) -> Iterator[None]:
    """Raises errors of the package and of the file system as CheckpointError with the name of the file."""
    try:
        yield
    except (needed("safetensors").SafetensorError, OSError) as error:
        text = f"safetensors file {file}: {error}"
        raise CheckpointError(text, fixes=["is it complete, and is this its path?"]) from error


def from_safetensors(path: str | Path, init: Any, *args: Any, rules: Rules) -> Any:
    """The state that ``init(*args)`` makes, with weights from a safetensors file, or a folder of them (Hugging Face).

    Args:
      path: the file, or a folder with ``*.safetensors``.
      init: the result of :func:`meshpar.init`; its layout and dims determine the shardings.
      *args: its arguments.
      rules: tensor name → (path of the leaf, dims of the tensor). The dims are the leaf's, in the tensor's order; ``(a b)`` is one
        dim of the tensor that contains two of the leaf's, the first one outermost. ``{layers}`` in a name represents the index
        along the leaf's dim ``layers``, with one tensor per index. Tensors are transposed, split and stacked by these names.

    Returns:
      The state. Weights are cast to the leaf's dtype; leaves without a rule are the results of ``init``. A process reads only the
      parts of tensors that its devices need, as far as the order of dims allows.

    Raises:
      CheckpointError: a missing tensor, a path that the state does not have, or a shape that does not fit.
      RankError: a leaf without dims, or dims that are not the leaf's.

    Example:
      >>> from safetensors.numpy import save_file
      >>> save_file({"fc.weight": np.ones((256, 64), np.float32)}, "torch.safetensors")  # torch stores [out, in]
      >>> init = mp.init(create, mesh=mesh, layout="embed: data; mlp: model", dims=weights)
      >>> rules = {"fc.weight": ("up", "mlp embed")}
      >>> loaded = mp.data.from_safetensors("torch.safetensors", init, jax.random.key(0), rules=rules)
      >>> loaded["up"].shape, float(loaded["up"].sum())
      ((64, 256), 16384.0)
    """
    files = _opened(path)
    held = {h.path: h for h in init.plan(*args).outputs}
    leaves, back = by_name(init(*args))
    for name, (leaf, dims) in rules.items():
        if leaf not in leaves:
            text = f"rule {name!r}: the state has no `{leaf}`"
            raise CheckpointError(text, path=leaf, fixes=did_you_mean(leaf, leaves, "leaves"))
        reader = _Reader(files, name, dims, leaf, format_dims(held[leaf].dims).split(), leaves[leaf].shape)
        x = leaves[leaf]
        leaves[leaf] = of_parts(x.shape, x.sharding, lambda index, r=reader, t=x.dtype: r.read(index).astype(t))
    return back(leaves)


def _opened(path: str | Path) -> dict[str, Any]:
    """Tensor → its open file, of a ``.safetensors`` file or all such files of a folder; only slices that are indexed are read.

    Raises:
      CheckpointError: there is no such file, or it is no safetensors file.
    """
    found = Path(path)
    files = sorted(found.glob("*.safetensors")) if found.is_dir() else [found]
    if not files or not all(f.is_file() for f in files):
        text = f"there is no safetensors file at {path}"
        raise CheckpointError(text, fixes=["a .safetensors file, or a folder of them"])
    out: dict[str, Any] = {}
    for file in files:
        with _errors_of(file):
            opened = needed("safetensors").safe_open(str(file), framework="flax")
            out.update(dict.fromkeys(opened.keys(), opened))
    return out


class _Reader:
    """Reads one leaf of a state from safetensors files: from one tensor, or from one tensor for each index along a
    stacked dim.

    Attributes:
      files: tensor → its open file.
      name: name of the tensor; ``{dim}`` in it is the index along a stacked dim.
      leaf, shape: path and shape of the leaf.
      stacked: the stacked dim, in a list of at most one.
      groups: for every dim of the tensor, the dims of the leaf that it merges, major to minor.
      size, axis: dim of the leaf → its size, its position.
      order: the dims of the leaf in the order of the tensor.
    """

    def __init__(
        self, files: Mapping[str, Any], name: str, dims: str, leaf: str, named: list[str], shape: tuple[int, ...]
    ):
        """Match the dims of a rule with the dims of the leaf.

        Args:
          dims: the dims of the tensor as the rule names them, with merged dims in parentheses.
          named: the names of the leaf's dims.

        Raises:
          RankError: a dim of the leaf has no name, or the rule names other dims.
          LayoutSyntaxError: more than one dim is stacked.
        """
        self.files, self.name, self.leaf, self.shape = files, name, leaf, shape
        self.stacked = [m[1] for m in _STACKED.finditer(name)]
        self.groups = [(m[1].split() if m[1] is not None else [m[2]]) for m in _GROUP.finditer(dims)]
        mine = [d for group in self.groups for d in group]
        if len(named) != len(shape) or "_" in named:
            text = f"`{leaf}` has dims without names: {' '.join(named)!r}"
            raise RankError(text, path=leaf, shape=shape, fixes=["name them all: dims= of mp.init, or Flax metadata"])
        if sorted(mine + self.stacked) != sorted(named):
            stacked = f" and {self.stacked}" if self.stacked else ""
            text = f"rule {name!r}: the dims {dims!r}{stacked} differ from the dims of `{leaf}`: {' '.join(named)!r}"
            raise RankError(text, path=leaf, shape=shape, fixes=[f"name all of `{' '.join(named)}`, each once"])
        if len(self.stacked) > 1:
            fix = "stack one dim, and name the others in the rule's dims"
            raise LayoutSyntaxError(f"rule {name!r}: one {{dim}} of a name is stacked", fixes=[fix])
        self.size = dict(zip(named, shape, strict=True))
        self.axis = {d: i for i, d in enumerate(named)}
        self.order = mine

    def tensors(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of :meth:`read`: name → tensor, of the full leaf ``x``."""
        x = x.transpose([self.axis[d] for d in (*self.stacked, *self.order)])
        shape = [math.prod(self.size[d] for d in group) for group in self.groups]
        if not self.stacked:
            return {self.name: x.reshape(shape)}
        return {_STACKED.sub(str(i), self.name): part.reshape(shape) for i, part in enumerate(x)}

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The elements of the leaf at ``index`` (a slice for each dim), as an array with the leaf's order of dims."""
        ranges = {d: range(*index[i].indices(self.shape[i])) for d, i in self.axis.items()}
        if not self.stacked:
            return self._one(self.name, ranges)
        (dim,) = self.stacked
        parts = [self._one(_STACKED.sub(str(k), self.name), ranges) for k in ranges[dim]]
        return np.stack(parts, axis=self.axis[dim])

    def _one(self, name: str, ranges: Mapping[str, range]) -> np.ndarray:
        """The elements of the tensor ``name`` in the given range of each dim of the leaf, as an array with the leaf's
        order of dims.

        Raises:
          CheckpointError: the tensor is absent, or its shape differs.
        """
        if name not in self.files:
            raise CheckpointError(f"there is no tensor {name!r}", fixes=did_you_mean(name, self.files, "tensors"))
        tensor = self.files[name].get_slice(name)
        want = [math.prod(self.size[d] for d in group) for group in self.groups]
        if list(tensor.get_shape()) != want:
            raise CheckpointError(
                f"{name} is {tensor.get_shape()}, and `{self.leaf}` needs {want}",
                path=self.leaf,
                fixes=["a rule with the dims in the order of the file, or a state of the file's sizes"],
            )
        starts, shape, later = [], [], []
        for group in self.groups:
            outer, *inner = group
            each = math.prod(self.size[d] for d in inner)
            r = ranges[outer]
            starts.append(slice(r.start * each, r.stop * each))  # contiguous: the outermost dim of the group
            shape += [len(r), *(self.size[d] for d in inner)]
            later += [slice(None), *(slice(ranges[d].start, ranges[d].stop) for d in inner)]
        read = np.asarray(tensor[tuple(starts)]).reshape(shape)[tuple(later)]
        rest = [d for d in sorted(self.axis, key=lambda d: self.axis[d]) if d not in self.stacked]
        return read.transpose([self.order.index(d) for d in rest])


def to_safetensors(path: str, step: int, target: str | Path, only: str = "*", rules: Rules | None = None) -> int:
    """Write leaves of a checkpoint as one safetensors file; returns the number of tensors.

    Args:
      only: a path pattern: the leaves to write, with ``/`` in their paths as ``.``.
      rules: as for :func:`from_safetensors`, which reads the file with the same rules: the tensors to write, instead of ``only``.

    Raises:
      RankError, LayoutSyntaxError: a rule that does not fit the dims of its leaf.
      CheckpointError: no leaf matches, the checkpoint is damaged, or the file cannot be written.
    """
    facts = facts_of(path, step)
    leaves = facts["leaves"]
    arrays = {p: leaf for p, leaf in leaves.items() if "digest" in leaf and "key" not in leaf}
    wanted = [p for p in arrays if path_matches(only, p)] if rules is None else [p for p, _ in rules.values()]
    missing = [p for p in wanted if p not in arrays] if wanted else [only]
    if missing:
        text = f"no array of checkpoint {step} matches {missing[0]!r}"
        raise CheckpointError(text, fixes=[f"it has {', '.join(list(leaves)[:8])}"])
    found = read_leaves(path, step, facts, dict.fromkeys(wanted))
    tensors = {p.replace("/", "."): x for p, x in found.items()}
    if rules is not None:
        tensors = {}
        for name, (leaf, dims) in rules.items():
            named = leaves[leaf].get("dims", "").split()
            tensors.update(_Reader({}, name, dims, leaf, named, found[leaf].shape).tensors(found[leaf]))
    _save(tensors, target)
    return len(tensors)


def _save(tensors: Mapping[str, np.ndarray], file: str | Path) -> None:
    with _errors_of(file):
        needed("safetensors.numpy").save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, str(file))


def to_peft(folder: str | Path, adapters: Mapping[str, Adapter], modules: Mapping[str, str]) -> int:
    """Write the adapters of :func:`meshpar.train.lora` as a folder that Hugging Face's PEFT loads; returns the number of tensors.

    ``adapter_model.safetensors`` has two matrices for each module, ``base_model.model.MODULE.lora_A.weight`` [rank, in] and
    ``….lora_B.weight`` [out, rank], and ``adapter_config.json`` their rank, ``lora_alpha`` and modules. Dims of W that are
    contracted, and those that are not, are merged in W's order. In several processes all must call it, and process 0 writes.

    Args:
      folder: is made if it does not exist.
      adapters: path of a weight → its adapter.
      modules: path of a weight → name of the module in the PyTorch model, without ``base_model.model.``. ``{layers}`` in it is the
        index along a stacked dim: ``"model.layers.{layers}.self_attn.q_proj"``.

    Raises:
      CheckpointError: an adapter without a module, or the file cannot be written.
      RankError: the module's name does not have one ``{…}`` for each stacked dim.
      UnsupportedError: adapters of different ranks or scales.

    Example:
      >>> adapted = mp.train.lora(loss_of, "*", rank=4)
      >>> adapters = adapted.init(jax.random.key(0), params, x)
      >>> modules = {"up": "model.mlp.up_proj", "down": "model.mlp.down_proj"}
      >>> mp.data.to_peft("adapters", adapters, modules)
      4
    """
    readers = _peft_readers({}, adapters, modules)
    tensors = {k: v for reader, x in readers for k, v in reader.tensors(fetch(x)).items()}
    sizes = {(a.lora_A.shape[-1], a.scale) for a in adapters.values()}
    if len(sizes) > 1:
        text = f"to_peft: the adapters have several ranks and scales: {sorted(sizes)}"
        raise UnsupportedError(text, fixes=["a folder for each mp.train.lora"])
    ((rank, scale),) = sizes
    targets = sorted({modules[path].rpartition(".")[2] for path in adapters})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale, "target_modules": targets}
    if jax.process_index() == 0:
        with _errors_of(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config, indent=2))
        _save(tensors, Path(folder) / "adapter_model.safetensors")
    return len(tensors)


def from_peft(folder: str | Path, adapters: Mapping[str, Adapter], modules: Mapping[str, str]) -> dict[str, Adapter]:
    """The adapters of a folder of Hugging Face's PEFT.

    Args:
      folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
      adapters: of :meth:`meshpar.types.Adapted.init`; their arrays are replaced by arrays of the same shardings and dtypes, and
        their scales by ``lora_alpha / r``. A process reads only the parts that its devices need.
      modules: as for :func:`to_peft`.

    Raises:
      CheckpointError: a missing file, tensor or module, or a shape that does not fit.
      RankError: the module's name does not have one ``{…}`` for each stacked dim.

    Example:
      >>> adapters = mp.train.lora(loss_of, "up", rank=4).init(jax.random.key(0), params, x)
      >>> mp.data.to_peft("adapters", adapters, {"up": "model.mlp.up_proj"})
      2
      >>> loaded = mp.data.from_peft("adapters", adapters, {"up": "model.mlp.up_proj"})
      >>> bool((loaded["up"].lora_A == adapters["up"].lora_A).all())
      True
    """
    with _errors_of(folder):
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
    readers = _peft_readers(_opened(f"{folder}/adapter_model.safetensors"), adapters, modules)

    def read(reader: _Reader, x: Any) -> Any:
        return of_parts(x.shape, x.sharding, lambda index: reader.read(index).astype(x.dtype))

    scale = config["lora_alpha"] / config["r"]
    arrays = [read(*each) for each in readers]
    pairs = zip(adapters.items(), arrays[::2], arrays[1::2], strict=True)
    return {path: replace(adapter, lora_A=a, lora_B=b, scale=scale) for (path, adapter), a, b in pairs}


def _peft_readers(
    files: Mapping[str, Any], adapters: Mapping[str, Adapter], modules: Mapping[str, str]
) -> list[tuple[_Reader, Any]]:
    """(reader or writer of the tensors of an array, the array) for A and B of each adapter."""
    out = []
    for path, adapter in adapters.items():
        if path not in modules:
            raise CheckpointError(f"modules= has no name for {path}", fixes=did_you_mean(path, modules, "names"))
        stacked = _STACKED.findall(modules[path])
        if len(stacked) != len(adapter.batch):
            text = f"{path} has {len(adapter.batch)} stacked dims, but the name {modules[path]!r} has the indices {stacked}"
            raise RankError(text, path=path, fixes=['one index for each: "model.layers.{layers}.self_attn.q_proj"'])
        rows, columns = (" ".join(f"w{d}" for d in dims) for dims in (adapter.contracted, adapter.free))
        for part, dims, named in (
            ("lora_A", f"rank ({rows})", f"{rows} rank"),
            ("lora_B", f"({columns}) rank", f"rank {columns}"),
        ):
            name, x = f"base_model.model.{modules[path]}.{part}.weight", getattr(adapter, part)
            out.append((_Reader(files, name, dims, f"{path}/{part}", [*stacked, *named.split()], x.shape), x))
    return out
