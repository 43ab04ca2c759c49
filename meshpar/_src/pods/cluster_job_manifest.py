"""``meshpar manifest``: the job of a training script on a cluster, as a JobSet for TPU slices or a Slurm script for GPU nodes.

Slices and nodes come from the text of a topology, as for plans: ``2x v5e:16x16`` is two slices of 64 hosts with four chips each.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass

from ...errors import TargetError
from ..hardware.topology import Topology, parse_topology
from ..keywords_and_flags import option
from .watch import PROGRAM, RESTARTABLE, USAGE

MAX_NAME = 63 - len("-slice-000-0000-xxxxx")
"""Characters of a job's name: a pod's name contains the names of the job, the slice and the host, and at most 63 characters."""
COORDINATOR_PORT = 8476


@dataclass(frozen=True)
class Manifest:
    """A job on a cluster.

    Attributes:
      topology: its slices or nodes.
      command: of each process, without the interpreter.
      name: of the job.
      image: container image of its pods.
      restarts: how often a JobSet starts again after a loss.
      time: limit of a Slurm job, as ``sbatch --time`` has it.
    """

    topology: str
    command: tuple[str, ...]
    name: str
    image: str = option("IMAGE", "container image of a JobSet, with Python, jax, meshpar and the script (%(default)s)")
    restarts: int = option(20, "of a JobSet after a loss (%(default)s)")
    time: str = option("12:00:00", "limit of a Slurm job (%(default)s)")


def manifest(job: Manifest, to: str | None = None) -> str:
    """The text of a job's manifest.

    Args:
      to: ``"jobset"`` or ``"slurm"``; None: the one that the topology's chips have.

    Raises:
      MeshError: the topology does not exist.
      TargetError: GPUs as a JobSet, TPUs under Slurm, or an invalid name, time or number of restarts.
    """
    topology = parse_topology(job.topology)
    has = "slurm" if topology.chip.switch else "jobset"
    if to not in (None, has):
        what = "GPUs: a Slurm script has them" if topology.chip.switch else "TPU slices: a JobSet has them"
        raise TargetError(f"--to {to}: {topology} are {what}", fixes=[f"--to {has}"])
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > MAX_NAME:
        text = f"{job.name!r} is no name of a job: at most {MAX_NAME} lowercase letters, digits and `-`, a letter first"
        raise TargetError(text, fixes=[f"--name {job_name(job.name)}"])
    if job.restarts < 0:
        raise TargetError(f"--restarts {job.restarts}: at least 0", fixes=["--restarts 20"])
    if not re.fullmatch(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}", job.time):
        raise TargetError(
            f"--time {job.time!r} is no time limit of Slurm", fixes=["--time 12:00:00, or days: 2-00:00:00"]
        )
    return _slurm(job, topology) if topology.chip.switch else _jobset(job, topology)


def job_name(text: str) -> str:
    """The name of a job for a script or a module: ``examples/train_lm.py`` → ``train-lm``."""
    stem = re.sub(r"\.py$", "", text).rpartition("/")[2].rpartition(".")[2]
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")[:MAX_NAME].rstrip("-") or "train"


def hosts_of(topology: Topology) -> tuple[int, int]:
    """(hosts of one slice, chips of each); for GPUs, (nodes of the job, GPUs of each)."""
    chips, chip = math.prod(topology.chips), topology.chip
    if chip.switch:
        each = min(chips, chip.switch)
        return topology.slices * chips // each, each
    return (1, chips) if chips <= chip.single_host else (chips // chip.host, chip.host)


def _jobset(job: Manifest, topology: Topology) -> str:
    """A JobSet with one Job for each slice, and one pod for each of its hosts."""
    chip = topology.chip
    hosts, chips = hosts_of(topology)
    # GKE lists the sides of a slice in one order
    shape = next(s for s in chip.shapes(math.prod(topology.chips)) if sorted(s) == sorted(topology.chips))
    sides = "x".join(map(str, shape))
    command, *args = (_quoted(word) for word in ("python", *job.command))
    words = "".join(f"\n                    - {word}" for word in args)
    several = topology.slices > 1
    what = f"{topology.slices} slices of {topology.kind}:{sides}" if several else f"A slice of {topology.kind}:{sides}"
    return f"""\
# {what}{" as one job" * several}; after a loss all pods start from the last checkpoint.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool # a slice each
spec:
  failurePolicy:
    maxRestarts: {job.restarts}
    rules:
      - name: script
        action: FailJobSet # the script failed ({PROGRAM}), or its input is bad ({USAGE})
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: {topology.slices}
      template:
        spec:
          parallelism: {hosts} # hosts of a slice
          completions: {hosts}
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: In
                  values: [{PROGRAM}, {USAGE}]
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 120 # time to save
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: {chip.gke}
                cloud.google.com/gke-tpu-topology: {sides}
              containers:
                - name: train
                  image: {_quoted(job.image)} # Python, jax[tpu], meshpar[checkpoint], the script
                  command: [{command}]
                  args:{words}
                  env:
                    - name: JAX_COORDINATOR_ADDRESS # process 0; GKE sets the others
                      value: "{job.name}-slice-0-0.{job.name}:{COORDINATOR_PORT}"
                    - name: PYTHONUNBUFFERED
                      value: "1"
                  resources:
                    limits:
                      google.com/tpu: {chips}
"""


def _quoted(text: str) -> str:
    """A text as a YAML scalar in ASCII; JSON's escapes of characters above U+FFFF are others than YAML's."""
    return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'


def _slurm(job: Manifest, topology: Topology) -> str:
    """A script for ``sbatch``, with one process for each GPU."""
    nodes, gpus = hosts_of(topology)
    command = " ".join(map(shlex.quote, ("python", *job.command)))
    return f"""\
#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --time={job.time}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# One process for each GPU of {topology}. Two minutes before the time limit they receive SIGTERM,
# and save. After that, or after a loss, the job is queued again, and continues.

srun --kill-on-bad-exit=0 {command}
status=$?

case $status in
    0) ;;
    # a process was lost, or all have saved; or one was ended by a signal
    {RESTARTABLE} | 12[89] | 1[3-9]?) scontrol requeue "$SLURM_JOB_ID" ;;
    *) exit "$status" ;; # the script failed, or its mesh or layout is invalid
esac
"""
