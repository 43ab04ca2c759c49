"""Private APIs and differences between versions of JAX and other packages, and defects of compilers.

.. code-block:: text

    jax                   JAX functions that are private or that differ between versions
    compile_only_devices  compile-only devices, and compilation for them
    coordination          JAX's coordination service
    equation_templates    equations that are traced once and added again for other operands
    loop_operands         constants, carries and stacks of loops
    lazy_nnx              Flax NNX, imported at first use
    orbax                 orbax, imported at first use
    installed_versions    versions of installed packages
    quirks                workarounds for defects of compilers
"""
