"""From a call of a user's function to a compiled step. Each module uses only the ones below it:

.. code-block:: text

    cli              the command ``meshpar``
    doctor           its command ``doctor``
    tune_kernels     its command ``tune-kernels``
    cli_target       a function in a file, and its arguments, from the command line
    move             ``mp.move``: the plan of a move between layouts, meshes and steps
    api              mp.jit, mp.init, mp.plan, mp.infer_dims, mp.check, mp.compile, mp.search, mp.lab, …
    local_sgd        mp.train.local_sgd: copies of a model that are averaged after many steps
    jitted           the result of mp.jit: options, roles of arguments, one compiled step for each signature
    exported         a compiled step as a file
    compiled         a plan that is lowered and compiled: places arguments, runs, returns results
    tracing          a function and its arguments as a program with named dims
    arguments        trees of arguments as flat arrays and static leaves
    options          the options of a step: one value for all of them, their checks, and their flags
    startup_message  the line that the command shows while Python imports JAX

A call of a step goes ``jitted`` → ``arguments`` → ``tracing`` → ``passes.make_plan`` → ``compiled`` → ``lower``; later calls with
the same signature go from ``jitted`` to ``compiled`` at once.
"""
