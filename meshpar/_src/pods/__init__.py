"""Several processes: how they start, agree, watch each other, read data and keep checkpoints.

.. code-block:: text

    cli                       the commands launch, manifest, checkpoint
    launch                    the processes of one machine
    cluster_job_manifest      jobs for GKE and Slurm
    start                     mp.distributed()
    rendezvous                connections to process 0 before JAX starts
    watch                     progress of all processes; ends them if one is lost
    stop                      the request to stop
    process_agreement         all processes compare programs and arguments
    data                      batches
    balance_packed_documents  packed documents in the order that balances attention
    checkpoint                checkpoints by name
    copies_in_memory          copies of states in the memory of hosts
    foreign                   safetensors
    state_by_name             state trees as name → array
    digest                    digests that do not depend on sharding
    audit                     copies of replicated arrays, compared during a run
    lock                      the lock of a folder of checkpoints
"""
