"""Batches for the devices of all processes, arrays between hosts and devices, and weights from files."""

from ._src.global_arrays import fetch
from ._src.pods.balance_packed_documents import balance
from ._src.pods.data import batches, put
from ._src.pods.foreign import from_peft, from_safetensors, to_peft

__all__ = ["balance", "batches", "fetch", "from_peft", "from_safetensors", "put", "to_peft"]
