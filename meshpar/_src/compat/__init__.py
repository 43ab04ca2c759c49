"""Private APIs and differences between versions of JAX and other packages, and defects of compilers.

.. code-block:: text

    jax        JAX functions that are private or that differ between versions
    devices    compile-only devices, and compilation for them
    processes  JAX's coordination service
    templates  equations that are traced once and added again for other operands
    loops      constants, carries and stacks of loops
    nnx        Flax NNX, imported at first use
    orbax      orbax, imported at first use
    versions   versions of installed packages
    quirks     workarounds for defects of compilers
"""
