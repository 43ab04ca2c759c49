"""Program + layout + mesh → plan: the steps of every device, and why.

.. code-block:: text

    planner                   makes a plan, op by op
    program_variants          the forms of a program that are planned: as traced, as pipelines, with divisible slices
    assignment                mesh axes of the dims of values and of the factors of ops, under a layout
    factor_specs              which axes of factors give contiguous shards, and the specs of arrays from factors
    decide                    how each op is split, and the specs of its operands and results
    bytes_sent_by_op          bytes that one op sends
    reshape                   the axes of a reshape's factors
    input_independent_values  arrays of which each device makes its part
    deferred_sums             where partial values are reduced
    control_flow              bodies of loops, branches and calls
    shard_map_inside_jit      ops that the jit lowering partitions itself
    emit                      writes the steps of an op
    body_builder              bodies under construction
    plan_cache                caches that plans of one program share
    checks                    errors of planning
    causes                    why a collective is needed, in words
    collective_records        makes the records of collectives
    collectives               the record of a collective
    resharding                the moves between two specs
    shard_shapes              shard shapes and bytes of a spec
    steps                     the steps of a plan
    plan                      the plan
    request                   the request: layout, mesh, options
    text                      the steps as text
    verify                    invariants of the steps
"""
