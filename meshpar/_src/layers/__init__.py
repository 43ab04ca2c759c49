"""What models call: attention, mixtures of experts, microbatches, scaled matmuls, checkpoint policies.

.. code-block:: text

    attention                  attention over a sequence that may be sharded
    loss                       cross entropy over a large vocabulary
    recurrence                 recurrences along a sequence that may be sharded
    moe                        mixtures of experts
    accumulate                 gradient accumulation
    scaled_matmul              matmuls of operands in 8 and 4 bits, and their gradients
    rewrite_weight_matmuls     replaces the matmuls of weights in a traced function by these
    loss_scale                 loss scaling for float16, and the noise scale
    checkpoint_policies        policies for jax.checkpoint
    offload_moments            optimizer moments in host memory
    eight_bit_optimizer_state  optimizer state in 8 bits
    block_codes                arrays as 8-bit codes with a scale per block
"""
