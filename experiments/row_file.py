"""Shared parts of the experiments that train on the rows of a data file (``dataset.path``):
``experiments/sft.py`` and ``experiments/dpo.py``."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from realhf.api.config import ConfigError, ExperimentConfig
from realhf.api.experiment import EvaluationSpec, JobSpec, SourceSpec, artifact_exists
from realhf.api.parallel import SHARDED
from realhf.base.files import content_key, find_imported_files
from realhf.base.installation import PACKAGE
from realhf.data.row_formats import check_rows
from realhf.data.tokenized_rows import EXAMPLES_FILE
from realhf.monitor.provenance import package_versions

PROGRAM = "realhf.data.tokenize_rows"
"""Module that is run to tokenise the rows."""
TIMEOUT_S = 6 * 3600.0
"""Timeout in seconds of tokenising a file."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Endings of files of a model's folder that have no effect on its tokenizer."""


class RowFile(NamedTuple):
    """A data file as an experiment uses it."""

    model: str
    """Folder or hub id of the model to train."""
    jobs: tuple[JobSpec, ...]
    """Jobs that create an untrained model, if needed, and tokenise the rows."""
    rows: Path
    """Folder of the tokenised rows."""

    def source(self, keys: tuple[str, ...], worker: int) -> SourceSpec:
        """Return the data source with these keys, whose tensors ``worker`` stores."""
        rows = {"path": str(self.rows)}
        return SourceSpec("tokenized_rows", rows, keys=keys, worker=worker, dataset_args=rows)


def prepare_rows(
    config: ExperimentConfig, kind: str, cache: Path, untrained: JobSpec | None
) -> RowFile:
    """Return the data file of ``dataset.path``, all of whose rows are checked.

    Args:
        config: Configuration.
        kind: ``SUPERVISED`` or ``PREFERENCE``.
        cache: Folder in which tokenised rows are kept for later runs.
        untrained: Job that creates the model to train; None for the model of ``actor.path``.

    Raises ConfigError that names the file, the line and the field of the first invalid row.
    """
    dataset = config.dataset
    file = Path(str(dataset.path)).expanduser().resolve()
    path = config.actor.path
    made_from = [path]
    if untrained is not None:
        path = str(untrained.artifact)
        made_from = [untrained.artifact.name]
    elif Path(path).expanduser().is_dir():
        path = str(Path(path).expanduser())
        made_from = [*_hash_files(Path(path), WEIGHTS)]
    options = (
        *("--kind", kind),
        *("--train-on", dataset.train_on),
        *("--max-tokens", str(config.rollout.max_total_tokens)),
        *("--too-long", dataset.too_long),
        *("--held-out", str(dataset.held_out)),
        *("--seed", str(config.seed)),
        *("--shown", str(dataset.shown)),
        *("--tool-parser", config.actor.tool_parser),
        *("--template-kwargs", json.dumps(dict(config.actor.chat_template_kwargs))),
    )
    versions = package_versions(("transformers", "tokenizers"))
    try:
        key = content_key(
            [*_hash_files(file), *made_from, *options, versions],
            find_imported_files(PACKAGE, (PROGRAM,)),
        )
        # Rows that were tokenised before are valid, unless they or the code have changed.
        if not artifact_exists(cache / f"rows-{key}"):
            _check_rows(file, kind, _state(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset.path: {' '.join(str(error).split())}") from None
    job = JobSpec(
        "rows",
        PROGRAM,
        argv=(str(file), "--model", path, "--out", "{artifact}", *options),
        artifact=cache / f"rows-{key}",
        timeout_s=TIMEOUT_S,
        report=EXAMPLES_FILE,
    )
    return RowFile(path, (job,) if untrained is None else (untrained, job), job.artifact)


def evaluate_rows(
    config: ExperimentConfig, rows: Path, args: dict[str, Any]
) -> EvaluationSpec | None:
    """Return the evaluation on the rows that are held out; None if there are none.

    ``args``: arguments of the interface. Raises ConfigError for a sharded model, which one worker
    cannot evaluate.
    """
    if not config.dataset.held_out:
        return None
    if config.actor.backend == SHARDED:
        raise ConfigError(
            f"dataset.held_out={config.dataset.held_out:g}: rows are evaluated by one worker, and "
            f"backend {SHARDED} shards the model; use torch or ddp, or set 0"
        )
    return EvaluationSpec(
        "actor",
        "rows_evaluation",
        args,
        {"rows": str(rows)},
        every_steps=config.evaluation.every_steps,
        generates=False,
    )


_FileState = tuple[tuple[str, int, int], ...]
"""(path, size, time of the last change) of files; their contents are read again if it differs."""


def _files(path: Path) -> list[Path]:
    """Return a file, or all files of a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file()]


def _state(path: Path, leave_out: tuple[str, ...] = ()) -> _FileState:
    """Return the state of a file, or of the files of a folder whose names have none of the endings
    ``leave_out``."""
    found = [(file, file.stat()) for file in _files(path) if file.suffix not in leave_out]
    return tuple((str(file), status.st_size, status.st_mtime_ns) for file, status in found)


# A launch builds its experiment once more for each option of the environment that is set.
@lru_cache(maxsize=4)
def _check_rows(file: Path, kind: str, state: _FileState) -> None:
    """Raise ValueError for the first invalid row of a file, which is read once for each state."""
    del state
    check_rows(file, kind)


def _hash_files(path: Path, leave_out: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return "NAME SHA-256" of a file, or of each file of a folder whose name has none of the
    endings ``leave_out``."""
    return _hash_state(_state(path, leave_out))


@lru_cache(maxsize=4)
def _hash_state(state: _FileState) -> tuple[str, ...]:
    hashes = []
    for name, _, _ in state:
        with open(name, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        hashes.append(f"{Path(name).name} {digest}")
    return tuple(hashes)
