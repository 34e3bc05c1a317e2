"""The manifest for Kubernetes against schemas that are not ours: core objects by kubernetes-validate, in an environment
of its own (``make test-jobset``), and the definition of JobSet's resource (``CRD=FILE``, the file
``jobset.x-k8s.io_jobsets.yaml`` of its project). Rules in CEL are not tried."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from realhf.cluster.engines import jobset

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
        job, name = role["template"]["spec"], {"name": f"run-1-{role['name']}-0"}
        found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": name, "spec": job})
        found.append({"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": job["template"]["spec"]})
    return found


def said_of(objects: list[dict[str, Any]], folder: Path) -> tuple[int, str]:
    """Exit code and words of kubernetes-validate."""
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    command = [str(VALIDATE), "--strict", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(not VALIDATE.exists(), reason="kubernetes-validate is not installed; make test-jobset")
def test_jobs_and_pods_fit_the_schemas_of_kubernetes(manifest: dict[str, Any], tmp_path: Path):
    objects = core_objects(manifest)
    assert [each["kind"] for each in objects] == ["Job", "Pod"] * 2
    code, said = said_of(objects, tmp_path)
    assert code == 0, said
    objects[2]["spec"]["template"]["spec"]["containers"][0]["commands"] = []
    code, said = said_of(objects, tmp_path)
    assert code != 0 and "commands" in said


def closed(schema: Any) -> Any:
    """The schema with no other fields than it names, as a server with strict field validation reads it."""
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
    assert (definition["spec"]["group"], definition["spec"]["names"]["kind"]) == (group, manifest["kind"])
    (served,) = [each for each in definition["spec"]["versions"] if each["name"] == version and each["served"]]
    schema = closed(served["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    check = jsonschema.Draft202012Validator(schema)
    check.validate(manifest)
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        check.validate(manifest)
