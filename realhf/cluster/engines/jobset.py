"""Print a JobSet for Kubernetes: one pod for the launcher, one for every host that joins it.

    python -m realhf.cluster.engines.jobset NAME --image IMAGE --claim CLAIM --hosts 2 -- experiment=NAME key=value \\
        | kubectl apply -f -

The cluster needs JobSet (jobset.x-k8s.io/v1alpha2). The keys come from a secret of the same name;
pods of hosts get those of all hosts, and not those of the launcher:

    python -m realhf.cluster keys cluster.key --host host-0 host-1 --into hosts.key
    kubectl create secret generic NAME --from-file=cluster.key --from-file=hosts.key && rm cluster.key hosts.key

CLAIM is a persistent volume claim that all pods mount at /runs, the run's fileroot: where they are
on several nodes its access mode is ReadWriteMany. IMAGE has this package installed; it need not run
as root. The arguments of the launch are checked here, unless --no-check says that they name files
of the image. Each JobSet has a secret of its own. The manifest was checked against the schemas of
JobSet and Kubernetes, not tried on a cluster.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import realhf

PORT = 7788
GROUP = 65532
"""Group id of the mounted secret's and volume's files, so that a container user other than root can
read them."""
CHECK_S = 120.0
RUNS = "/runs"
SECRET = "/etc/realhf"
KEY = "/tmp/cluster.key"
KEYS = {"launcher": "cluster.key", "host": "hosts.key"}
"""Key file from the secret that each kind of pod gets."""
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
OWN_KEY = f"install -m 600 {SECRET}/{{}} {KEY}"
"""Command that copies the key file. Only its owner may have access to it, and a mounted secret
cannot have that mode."""


def build_manifest(
    name: str,
    image: str,
    claim: str,
    hosts: int,
    arguments: Sequence[str],
    *,
    cpus: str,
    memory: str,
    gpus: int,
) -> dict[str, Any]:
    """Return the JobSet manifest for the given name, image, volume claim and number of hosts.

    A failed host pod is restarted. If the launcher fails, all pods are restarted, and the run
    continues from its last checkpoint. An evicted pod is restarted, which does not count as a
    failure.
    """
    if not any(text.startswith("trial_name=") for text in arguments):
        arguments = [*arguments, f"trial_name={name}"]  # a restarted launcher continues the run
    launch = [
        *(
            "python",
            "-m",
            "realhf.launch",
            *arguments,
            "scheduler=join",
            f"fileroot={RUNS}",
            "recover_mode=auto",
        ),
        *(f"scheduler.key_file={KEY}", f"scheduler.port={PORT}", f"scheduler.min_hosts={hosts}"),
    ]
    # The shell expands the pod's address and index; everything else is quoted.
    addresses = ' network.bind="$POD_IP" scheduler.address="$POD_IP"'
    launcher = f"tcp://{name}-launcher-0-0.{name}:{PORT}"
    join = ["python", "-m", "realhf.worker", "--join", launcher, "--key-file", KEY, "--host-agent"]
    name_option = ' --name "host-$JOB_COMPLETION_INDEX"'
    pod = {"image": image, "claim": claim, "secret": name, "cpus": cpus, "memory": memory}
    launcher = _build_job("launcher", 1, f"{shlex.join(launch)}{addresses}", pod, gpus=0, retries=0)
    host = _build_job("host", hosts, f"{shlex.join(join)}{name_option}", pod, gpus=gpus, retries=6)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "realhf"}},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [launcher, host],
        },
    }


def _build_job(
    role: str, pods: int, command: str, pod: Mapping[str, str], *, gpus: int, retries: int
) -> dict[str, Any]:
    resources = {"cpu": pod["cpus"], "memory": pod["memory"]} | (
        {"nvidia.com/gpu": str(gpus)} if gpus else {}
    )
    key = {"key": KEYS[role], "path": KEYS[role]}
    container = {
        "name": role,
        "image": pod["image"],
        "command": ["/bin/sh", "-c", f"{OWN_KEY.format(KEYS[role])} && exec {command}"],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "runs", "mountPath": RUNS},
            {"name": "keys", "mountPath": SECRET, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    template = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,
        "securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": pod["claim"]}},
            {
                "name": "keys",
                "secret": {"secretName": pod["secret"], "defaultMode": 0o440, "items": [key]},
            },
            # Shared memory for tensors between processes; a container's default is 64 MB.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "completions": pods,
        "parallelism": pods,
        "completionMode": "Indexed",
        "backoffLimit": retries,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                }
            ]
        },
        "template": {"spec": template},
    }
    return {"name": role, "replicas": 1, "template": {"spec": job}}


def _find_problem(arguments: Sequence[str]) -> str:
    """Return the error text of a launch with these arguments; "" if they are valid."""
    checked = [text for text in arguments if not text.startswith("fileroot=")]
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        *checked,
        "scheduler=join",
        "network.bind=10.0.0.1",
        "mode=check",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
    return done.stderr.strip() or "the launch cannot be checked" if done.returncode else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifest and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.cluster.engines.jobset",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("name", help="name of the JobSet and of its secret")
    parser.add_argument("--image", default="realhf:latest", help="container image (%(default)s)")
    parser.add_argument(
        "--claim", default="realhf-runs", help="persistent volume claim of /runs (%(default)s)"
    )
    parser.add_argument(
        "--hosts", type=int, default=1, help="pods that join the launcher (%(default)s)"
    )
    parser.add_argument("--cpus", default="8", help="cores of each pod (%(default)s)")
    parser.add_argument("--memory", default="32Gi", help="memory of each pod (%(default)s)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each host (%(default)s)")
    parser.add_argument(
        "--no-check", action="store_true", help="the arguments name files that only the image has"
    )
    parser.epilog = "Behind -- stand the arguments of realhf.launch."
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    if not NAME.fullmatch(options.name):
        parser.error(f"{options.name!r}: at most 40 small letters, digits and '-'")
    if not 1 <= options.hosts <= 4096 or options.gpus < 0:
        parser.error("--hosts must be between 1 and 4096, --gpus at least 0")
    if not options.no_check and (problem := _find_problem(arguments[end + 1 :])):
        print(problem, file=sys.stderr)
        return 2
    import yaml

    resources = {"cpus": options.cpus, "memory": options.memory, "gpus": options.gpus}
    jobset = build_manifest(
        options.name, options.image, options.claim, options.hosts, arguments[end + 1 :], **resources
    )
    print(yaml.safe_dump(jobset, sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
