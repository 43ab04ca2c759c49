"""Functions of a plan: FLOPs, fusion, memory, seconds.

.. code-block:: text

    decoding               of a step of decoding: tokens per second, the limit of HBM, the largest batch
    time                   the seconds of a step
    memory                 the bytes that are live on a device after every kernel, and the peak
    schedule               when kernels, collectives and host copies start and end
    kernel_time            the seconds of each kernel
    collective_matmul      exposed seconds of collectives next to matmuls: separate, as a ring, in a fused kernel
    vmem_resident_buffers  the arrays that a TPU keeps in VMEM between kernels
    donation               results that alias donated arguments, and arguments that could be donated
    buffer_roles           parameter, optimizer state, gradient, saved activation, or another
    flops                  FLOPs of matmuls and convolutions, and redundant ones
    device_computation     the computation of one device: its ops, collectives and loops as kernels
    fusion                 ops fused into kernels, and the buffers between these
    tiles                  padding of arrays in a TPU's memory
    caching                results that are computed once per plan
"""
