"""Private JAX APIs and differences between JAX versions (``jax``, ``devices``, ``processes``); compiler defects (``quirks``)."""
