"""Makes the policy of ``actor.path=builtin_tiny``: random weights and a token for each byte.

With it any environment can be tried at once, without demonstrations and without downloads.
"""

from __future__ import annotations

from pathlib import Path

from realhf.api.config import ExperimentConfig
from realhf.api.experiment import JobSpec
from realhf.base.content_key import content_key
from realhf.base.dataclass_json import to_json_value
from realhf.base.paths import PACKAGE
from realhf.monitor.provenance import package_versions


def untrained_policy(config: ExperimentConfig) -> JobSpec:
    """Return the job that makes the policy; its artifact is the folder of the model, found again by the content of all
    that it depends on."""
    builtin = to_json_value(config.builtin)
    versions = package_versions(("torch", "transformers", "tokenizers"))
    key = content_key([builtin, config.seed, versions], [PACKAGE / "backends" / "builtin_policy.py"])
    options = [text for name, value in builtin.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    folder = Path(config.warm_start.cache_dir or Path(config.fileroot) / "warm_start").expanduser().resolve()
    return JobSpec(
        "builtin_policy",
        "realhf.backends.builtin_policy",
        artifact=folder / f"bytes-{key}",
        argv=("--out", "{artifact}", "--seed", str(config.seed), *options),
    )
