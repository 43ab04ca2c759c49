"""Manifests: a JobSet that is valid by the CRD's schema, the options of sbatch, hosts and node labels of slices, and bad input."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshpar._src.entry.cli import main
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.hardware.topology import parse_topology
from meshpar._src.pods.cluster_job_manifest import MAX_NAME, Manifest, hosts_of, manifest
from meshpar.errors import MeshError, TargetError

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "tests" / "data" / "jobset_schema.json").read_text())
LABEL, SIDES = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"


def jobset(topology, *command, **options):
    text = manifest(Manifest(topology, command or ("train.py",), "train", **options))
    made = yaml.safe_load(text)
    jsonschema.validate(made, SCHEMA)
    (job,) = made["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    return made, job, pod, pod["containers"][0]


def test_a_jobset_has_a_job_for_each_slice_and_a_pod_for_each_host():
    command = ["train.py", "--layout=batch: slice+data; embed: data", 'say "a"']
    made, job, pod, container = jobset("2x v5e:16x16", *command, restarts=3)
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert made["metadata"]["annotations"] == exclusive
    assert made["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert job["replicas"] == 2
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 64
    assert pod["nodeSelector"].keys() == {LABEL, SIDES}
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert container["args"] == command
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    # job, index, host, and the service of the JobSet
    assert re.fullmatch(r"train-slice-0-0\.train:\d+", env["JAX_COORDINATOR_ADDRESS"])


@pytest.mark.parametrize(
    ("topology", "label", "sides", "hosts", "chips"),
    [
        ("v5e:2x2", "tpu-v5-lite-podslice", "2x2", 1, 4),
        ("v5e:2x4", "tpu-v5-lite-podslice", "2x4", 1, 8),
        ("v5litepod-16", "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v6e:4x8", "tpu-v6e-slice", "4x8", 8, 4),
        ("v4:2x2x1", "tpu-v4-podslice", "2x2x1", 1, 4),
        ("v5p:8x4x4", "tpu-v5p-slice", "4x4x8", 32, 4),  # GKE lists the sides in one order
        ("tpu7x:4x4x4", "tpu7x", "4x4x4", 16, 4),
    ],
)
def test_hosts_and_labels_of_slices(topology, label, sides, hosts, chips):
    _, job, pod, container = jobset(topology)
    assert pod["nodeSelector"] == {LABEL: label, SIDES: sides}
    assert job["template"]["spec"]["completions"] == hosts
    assert container["resources"]["limits"]["google.com/tpu"] == chips


@pytest.mark.parametrize("chip", [c for c in CHIPS.values() if not c.switch], ids=lambda c: c.name)
def test_every_slice_of_every_chip_is_whole_hosts(chip):
    for shape in chip.shapes():
        hosts, chips = hosts_of(parse_topology(f"{chip.name}:{'x'.join(map(str, shape))}"))
        assert hosts * chips == math.prod(shape)


@given(word=st.text(min_size=1), image=st.sampled_from(["😀:\u2028", "a\x85\x7f\\n"]))
@example(word="\\ud83d\\ude00 😀", image="x")
@settings(max_examples=30)
def test_arguments_of_all_characters(word, image):
    text = manifest(Manifest("v5e:2x2", ("train.py", word), "train", image))
    lines = [line.strip() for line in text.splitlines()]
    args = lines[lines.index("args:") + 1 : lines.index("env:")]
    assert yaml.safe_load("\n".join(args)) == ["train.py", word]
    assert yaml.safe_load(next(line for line in lines if line.startswith("image:"))) == {"image": image}


def directives(text):
    """Option → value of the ``#SBATCH`` lines, all of them before the first command, as sbatch requires."""
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    found = [m for line in lines[:first] if (m := re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line))]
    assert len(found) == text.count("#SBATCH")
    return {m[1]: m[2] for m in found}


@pytest.mark.parametrize(
    ("topology", "nodes", "gpus"), [("4x h100:8", "4", "8"), ("h200:16", "2", "8"), ("h100:4", "1", "4")]
)
def test_a_slurm_script_has_a_process_for_each_gpu(topology, nodes, gpus):
    text = manifest(Manifest(topology, ("train.py", "--layout", "batch: data"), "train", time="2-00:00:00"))
    assert directives(text) == {
        "job-name": "train", "nodes": nodes, "ntasks-per-node": gpus, "gpus-per-node": gpus, "time": "2-00:00:00",
        "requeue": None, "open-mode": "append", "signal": "TERM@120",
    }  # fmt: skip
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    (run,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert shlex.split(run)[2:] == ["python", "train.py", "--layout", "batch: data"]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 127, 134, 137, 143, 255])
def test_a_slurm_job_is_queued_again_after_a_loss(code, tmp_path):
    requeued = code in (75, 134, 137, 143)
    for name, body in (("srun", f"exit {code}"), ("scontrol", f"echo $@ > {tmp_path}/called")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    text = manifest(Manifest("h100:8", ("train.py",), "train"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash"], input=text, text=True, env=env).returncode == (0 if requeued else code)
    assert (tmp_path / "called").exists() == requeued


def test_the_manifests_of_the_examples_are_those_of_the_command(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--checkpoint=gs://BUCKET/runs/a", "--mesh=slice=2, data=-1", "--layout=batch: slice+data; embed: data"]
    to_jobset = ["--topology", "2x v5e:16x16", "--to", "jobset"]
    assert main(["manifest", *to_jobset, "examples/train_lm.py", *words, "--batch=512"]) == 0
    assert capsys.readouterr().out == Path("examples/pods/jobset.yaml").read_text()
    words = ["--checkpoint", "runs/a", "--layout", "fsdp", "--batch", "256"]
    assert main(["manifest", "--topology", "4x h100:8", "--to", "slurm", "examples/train_lm.py", *words]) == 0
    assert capsys.readouterr().out == Path("examples/pods/slurm.sh").read_text()


def test_bad_input(capsys):
    def wrong(error, says, topology="v5e:4x4", to=None, name="a", **options):
        with pytest.raises(error, match=says) as raised:
            manifest(Manifest(topology, ("a.py",), name, **options), to)
        return raised.value

    assert wrong(TargetError, "TPU slices", to="slurm").fixes == ("--to jobset",)
    wrong(TargetError, "GPUs", "h100:8", "jobset")
    wrong(MeshError, "no v5e slice of 3x3", "v5e:3x3")
    for name in ("Train", "7a", "a_b", "a-", "a" * (MAX_NAME + 1)):
        wrong(TargetError, "is no name of a job", name=name)
    wrong(TargetError, "--restarts -1", restarts=-1)
    wrong(TargetError, "time limit", "h100:8", time="tomorrow")
    assert main(["manifest", "--topology", "v5e:4x4", "nothing.py"]) == 2
    assert "there is no file nothing.py" in capsys.readouterr().err
