"""The manifest for Kubernetes: it fits the part of the schema that it uses, and its commands fit our own. It was not
tried on a cluster."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from realhf.cluster.engines import jobset

SCHEMA = json.loads(Path(__file__).with_name("jobset.schema.json").read_text())
HOSTILE = "actor.path=/x y/$(touch hacked)';z"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert jobset.main(arguments) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_the_manifest_fits_its_schema(capsys):
    found = printed(
        capsys, "run-1", "--no-check", "--hosts", "3", "--gpus", "8", "--", "experiment=grpo_async", HOSTILE
    )
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    launcher, host = (job["template"]["spec"] for job in found["spec"]["replicatedJobs"])
    assert host["completions"] == host["parallelism"] == 3
    pod = host["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert "nvidia.com/gpu" not in launcher["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_a_mistake_does_not_fit_the_schema(capsys):
    found = printed(capsys, "run-1", "--no-check")
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(found)


def test_hosts_join_the_launcher_by_its_name_and_arguments_arrive_as_they_were_given(capsys):
    found = printed(capsys, "run-1", "--no-check", "--", "experiment=grpo_async", HOSTILE)
    shells = [
        job["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
        for job in found["spec"]["replicatedJobs"]
    ]
    assert all(shell[:2] == ["/bin/sh", "-c"] for shell in shells)
    launch, join = (shlex.split(shell[2]) for shell in shells)
    assert HOSTILE in launch and "scheduler.min_hosts=1" in launch and "network.bind=$POD_IP" in launch
    assert "tcp://run-1-launcher-0-0.run-1:7788" in join and "host-$JOB_COMPLETION_INDEX" in join


@pytest.mark.parametrize("arguments", [["Run"], ["a" * 41], ["run", "--hosts", "0"], ["run", "--gpus", "-1"]])
def test_what_cannot_be_a_jobset_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        jobset.main(arguments)
    assert "error:" in capsys.readouterr().err


def test_a_pod_that_is_put_out_is_no_failure_and_no_pod_needs_root_or_more_memory_than_it_shares(capsys):
    """A disruption of the launcher's pod cost one of the restarts; a secret that only root reads ended an image that is
    not root; and 64 MB of shared memory were all there was."""
    found = printed(capsys, "run-1", "--no-check")
    for job in (each["template"]["spec"] for each in found["spec"]["replicatedJobs"]):
        (rule,) = job["podFailurePolicy"]["rules"]
        assert rule["action"] == "Ignore" and rule["onPodConditions"][0]["type"] == "DisruptionTarget"
        pod = job["template"]["spec"]
        assert pod["restartPolicy"] == "Never", "Kubernetes wants it where there is a podFailurePolicy"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
        assert volumes["keys"]["secret"]["defaultMode"] == 0o440 and pod["securityContext"]["fsGroup"]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_launch_that_cannot_begin_is_refused_and_no_manifest_printed(capsys):
    """The page's own command printed one whose launcher ended at once."""
    assert jobset.main(["run-1", "--", "experiment=grpo_async"]) == 2
    said = capsys.readouterr()
    assert "choose an environment" in said.err and not said.out
    assert printed(capsys, "run-1", "--", "experiment=grpo_async", "env=sql", "fileroot=/runs")
