"""Proof that a layout does not change the result, and comparisons of plans with compiled programs.

.. code-block:: text

    check                mp.check
    numbers              differences of arrays, and the effect of rounding
    localize             the first op that is wrong
    wide                 a jaxpr in a wider dtype
    aot                  mp.compile
    tuned_options        options of the TPU compiler for one program, by its schedules
    compilation_jobs     compilations in other processes, cached
    compiler_process     the process of a compiler
    out_of_memory_error  the error for a program that does not fit
    exposed              exposed communication of a compiled TPU program
    hlo_flops            FLOPs of HLO text
    hlo                  collectives and cycles of HLO text
    trip_counts          trip counts of HLO loops
    hlo_text             parser of HLO text
    profile              a plan compared with a trace
    proofs               mp.prove
    prove                the checker of per-device programs
    trace                reads traces of jax.profiler
"""
