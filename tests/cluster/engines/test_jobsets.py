"""The manifest for Kubernetes: what it says, and that it fits the schemas of JobSet and
Kubernetes."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

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
        capsys,
        "run-1",
        "--no-check",
        "--hosts",
        "3",
        "--gpus",
        "8",
        "--",
        "experiment=grpo_async",
        HOSTILE,
    )
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    launcher, host = (job["template"]["spec"] for job in found["spec"]["replicatedJobs"])
    assert host["completions"] == host["parallelism"] == 3
    pod = host["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert (
        "nvidia.com/gpu" not in launcher["template"]["spec"]["containers"][0]["resources"]["limits"]
    )


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
    assert (
        HOSTILE in launch and "scheduler.min_hosts=1" in launch and "network.bind=$POD_IP" in launch
    )
    assert "tcp://run-1-launcher-0-0.run-1:7788" in join and "host-$JOB_COMPLETION_INDEX" in join


@pytest.mark.parametrize(
    "arguments", [["Run"], ["a" * 41], ["run", "--hosts", "0"], ["run", "--gpus", "-1"]]
)
def test_what_cannot_be_a_jobset_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        jobset.main(arguments)
    assert "error:" in capsys.readouterr().err


def test_a_pod_that_is_put_out_is_no_failure_and_no_pod_needs_root_or_more_memory_than_it_shares(
    capsys,
):
    """A disruption of the launcher's pod cost one of the restarts; a secret that only root reads
    ended an image that is not root; and 64 MB of shared memory were all there was."""
    found = printed(capsys, "run-1", "--no-check")
    for job in (each["template"]["spec"] for each in found["spec"]["replicatedJobs"]):
        (rule,) = job["podFailurePolicy"]["rules"]
        assert (
            rule["action"] == "Ignore" and rule["onPodConditions"][0]["type"] == "DisruptionTarget"
        )
        pod = job["template"]["spec"]
        assert pod["restartPolicy"] == "Never", (
            "Kubernetes wants it where there is a podFailurePolicy"
        )
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {
            mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
        assert (
            volumes["keys"]["secret"]["defaultMode"] == 0o440 and pod["securityContext"]["fsGroup"]
        )


@pytest.mark.nightly
@pytest.mark.slow
def test_a_launch_that_cannot_begin_is_refused_and_no_manifest_printed(capsys):
    """The page's own command printed one whose launcher ended at once."""
    assert jobset.main(["run-1", "--", "experiment=grpo_async"]) == 2
    said = capsys.readouterr()
    assert "choose an environment" in said.err and not said.out
    assert printed(capsys, "run-1", "--", "experiment=grpo_async", "env=sql", "fileroot=/runs")


VALIDATE = Path(__file__).resolve().parents[3] / ".venv-kubernetes" / "bin" / "kubernetes-validate"
OPTIONS = (
    "run-1",
    "--no-check",
    "--hosts",
    "3",
    "--gpus",
    "8",
    "--",
    "experiment=grpo_async",
    "actor.path=/x y/$(touch hacked)';z",
)


@pytest.fixture
def manifest(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert jobset.main(OPTIONS) == 0
    return yaml.safe_load(capsys.readouterr().out)


def core_objects(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The Job of each role, and the pod of each Job."""
    found = []
    for role in manifest["spec"]["replicatedJobs"]:
        job = role["template"]["spec"]
        name = {"name": f"run-1-{role['name']}-0"}
        found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": name, "spec": job})
        found.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": job["template"]["spec"]}
        )
    return found


def said_of(objects: list[dict[str, Any]], folder: Path) -> tuple[int, str]:
    """Exit code and words of kubernetes-validate."""
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    command = [str(VALIDATE), "--strict", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(
    not VALIDATE.exists(), reason="kubernetes-validate is not installed; make test-jobset"
)
def test_jobs_and_pods_fit_the_schemas_of_kubernetes(manifest: dict[str, Any], tmp_path: Path):
    objects = core_objects(manifest)
    assert [each["kind"] for each in objects] == ["Job", "Pod"] * 2
    code, said = said_of(objects, tmp_path)
    assert code == 0, said
    objects[2]["spec"]["template"]["spec"]["containers"][0]["commands"] = []
    code, said = said_of(objects, tmp_path)
    assert code != 0 and "commands" in said


def closed(schema: Any) -> Any:
    """The schema with no other fields than it names, as a server with strict field validation reads
    it."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(each) for name, each in schema.items()}
    named = isinstance(found.get("properties"), dict) and "type" in found
    if named and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def test_the_whole_manifest_fits_the_definition_of_its_resource(
    manifest: dict[str, Any], request: pytest.FixtureRequest
):
    file = request.config.getoption("--jobset-crd")
    if file is None:
        pytest.skip("no definition of JobSet was given: make test-jobset CRD=FILE")
    definition = yaml.load(Path(file).read_text(), Loader=yaml.CSafeLoader)
    group, _, version = manifest["apiVersion"].partition("/")
    assert (definition["spec"]["group"], definition["spec"]["names"]["kind"]) == (
        group,
        manifest["kind"],
    )
    (served,) = [
        each
        for each in definition["spec"]["versions"]
        if each["name"] == version and each["served"]
    ]
    schema = closed(served["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    check = jsonschema.Draft202012Validator(schema)
    check.validate(manifest)
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        check.validate(manifest)
