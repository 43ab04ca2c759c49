"""Private JAX APIs and differences between JAX versions (``jax``, ``devices``, ``processes``), the parts of loops (``loops``),
optional packages that are imported at first use (``nnx``, ``orbax``), versions (``versions``); compiler defects (``quirks``).
"""
