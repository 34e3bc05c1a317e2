"""Checks of a configuration and of the models' folders before any process starts. They do not need
torch.

The fields of the configuration declare ranges and choices, and each section checks its own options
(``realhf/api/option.py``). This module contains the checks that involve several sections.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from realhf.api.chat_template import find_unread_variables
from realhf.api.config import (
    ConfigError,
    ExperimentConfig,
    ModelConfig,
    RecoverMode,
    TeacherConfig,
    run_folder,
)
from realhf.api.option import problems, sections
from realhf.api.parallel import SHARDED
from realhf.base.hf_config import (
    context_limit,
    context_reason,
    decoder_problem,
    expert_problem,
    is_block_matrix,
    routed_experts,
    tensor_shapes,
)
from realhf.base.installation import install_command
from realhf.env.loader.load import chosen_environment
from realhf.launch.plugins import load_scheduler
from realhf.launch.vllm_choice import find_executable, machine_problems
from realhf.registry import registered_names
from realhf.scheduler.machine import NO_GPUS, Machine


def check_config(config: ExperimentConfig, machine: Machine = NO_GPUS) -> None:
    """Raise ConfigError that lists all invalid values, also those that ``machine`` cannot follow.
    The experiment's module must have been imported, so that the names that it registers are
    known."""
    lines = [
        *problems(config, known=registered_names),
        *_sampling_problems(config),
        *_name_and_worker_problems(config),
        *_size_problems(config),
        *model_problems(
            "actor",
            config.actor,
            config.rollout.max_total_tokens,
            # Rows of plain text need no chat template; for others it is checked as they are read.
            renders=config.dataset.path is None,
        ),
        *checkpoint_problems("actor", config.actor.path),
        *adapter_problems("actor", config.actor),
        *_served_expert_problems(config),
        *_other_model_problems(config),
        *_host_problems(config, machine),
        *_machine_problems(config, machine),
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _other_model_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield errors of the experiment's other models, such as a critic, whose path may refer to the
    actor's weights."""
    for role, model in sections(config):
        if (
            isinstance(model, ModelConfig)
            and role != "actor"
            and model.path not in ("", "actor", *BUILTIN_PATHS)
        ):
            yield from model_problems(role, model, config.rollout.max_total_tokens, renders=False)
            yield from checkpoint_problems(role, model.path)
            yield from vocabulary_problems(role, model, config.actor, config.builtin.vocab_size)
        if isinstance(model, TeacherConfig) and model.path:
            model_config = _read_json(Path(model.path).expanduser() / "config.json")
            frozen = ModelConfig(path=model.path, experts=bool(routed_experts(model_config)))
            yield from model_problems(role, frozen, config.rollout.max_total_tokens, renders=False)
            yield from checkpoint_problems(role, model.path)
            yield from vocabulary_problems(role, frozen, config.actor, config.builtin.vocab_size)


def _served_expert_problems(config: ExperimentConfig) -> Iterator[str]:
    if config.actor.experts and config.engine.name == "vllm":
        yield (
            "actor.experts=true: vLLM keeps a tensor for each expert and the trainer one for all "
            "of them, so new "
            "weights would not fit; use engine.name=embedded"
        )


def _host_problems(config: ExperimentConfig, machine: Machine) -> Iterator[str]:
    """Yield an error for each thing that is missing on this machine and that a run would need only
    after some minutes: vLLM, trackers, a writable folder. ``machine`` may be another one, whose
    programs are not known."""
    engine = config.engine
    elsewhere = load_scheduler(config.scheduler.path).several_hosts
    if (
        engine.name == "vllm"
        and engine.vllm_url is None
        and not elsewhere
        and not machine.plan
        and find_executable(engine.vllm_executable) is None
    ):
        yield (
            f"engine.vllm_executable={engine.vllm_executable}: no such program on this "
            "machine, so engine.name=vllm cannot start a server; install vLLM in an "
            "environment of its own (`make vllm-cuda`, without a GPU `make test-vllm`) and name "
            "its program here, or name a running server with engine.vllm_url"
        )
    for name in config.monitor.trackers:
        if find_spec(name) is None:
            yield f"monitor.trackers: {name} is not installed: {install_command(name)}"
    existing = run_folder(config)
    # Path.exists, unlike os.path.exists, raises an error if a parent folder is not accessible.
    while not os.path.exists(existing):
        existing = existing.parent
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        yield f"fileroot: cannot write to {existing}: {error.strerror}"


def _machine_problems(config: ExperimentConfig, machine: Machine) -> Iterator[str]:
    """Yield the problems of this machine's GPUs, unless workers run on other hosts."""
    if not load_scheduler(config.scheduler.path).several_hosts:
        yield from machine_problems(config, machine)


def _sampling_problems(config: ExperimentConfig) -> Iterator[str]:
    for option in config.gen.truncating_options():
        yield (
            f"gen.{option}: tokens would be sampled from a truncated distribution and trained with "
            "the log-probabilities of the full one; training needs top_p=1, top_k=0 and "
            "min_new_tokens=0"
        )


def _name_and_worker_problems(config: ExperimentConfig) -> Iterator[str]:
    for role, workers in (("actor", config.actor.workers), ("ref", config.ref.workers)):
        if not workers or min(workers) < 0 or len(set(workers)) < len(workers):
            yield f"{role}.workers={workers}: give different indices of model workers, from 0"
    for option, text in (
        ("experiment_name", config.experiment_name),
        ("trial_name", config.trial_name),
    ):
        if not re.fullmatch(r"[\w.-]+", text) or text.startswith("."):
            yield (
                f"{option}={_shorten(text)!r}: use letters, digits, '_', '-' and '.'; it names a "
                f"folder"
            )
    yield from _path_length_problems(config)


_INSIDE_BYTES = 512
"""Maximum length in bytes of a file's path below the run folder."""


def _path_length_problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error if names or paths in the run folder would be longer than the file system
    allows."""
    folder = run_folder(config)
    existing = next(path for path in folder.parents if os.path.isdir(path))
    max_bytes = os.pathconf(existing, "PC_NAME_MAX")
    parts = [("fileroot", part) for part in folder.parts[:-2]]
    for option, text in (
        *parts,
        ("experiment_name", config.experiment_name),
        ("trial_name", config.trial_name),
    ):
        size = len(os.fsencode(text))
        if size > max_bytes:
            description = f"{option}={_shorten(text)}: a name of {size} bytes"
            yield f"{description}; the file system of {existing} takes {max_bytes} at most"
            return
    max_path_bytes = os.pathconf(existing, "PC_PATH_MAX") - _INSIDE_BYTES
    if len(os.fsencode(folder)) > max_path_bytes:
        yield (
            f"fileroot={_shorten(config.fileroot)}: the run folder's path has more than "
            f"{max_path_bytes} bytes; "
            "shorten it"
        )


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _size_problems(config: ExperimentConfig) -> Iterator[str]:
    heads = config.builtin.num_heads
    hidden = config.builtin.hidden_size
    if config.actor.path in BUILTIN_PATHS:
        if heads < 1 or hidden % heads or (hidden // heads) % 2:
            yield (
                f"builtin.hidden_size={hidden}: must be num_heads={heads} times an even head width"
            )
        if config.rollout.max_total_tokens > config.builtin.max_positions:
            yield (
                f"rollout.max_total_tokens={config.rollout.max_total_tokens}: the built-in policy "
                f"has "
                f"builtin.max_positions={config.builtin.max_positions}"
            )
    folder = run_folder(config)
    # Path.is_dir, unlike os.path.isdir, raises an error for a name that is too long, which is
    # reported elsewhere.
    if config.recover_mode is RecoverMode.resume and not os.path.isdir(folder / "checkpoints"):
        others = sorted(path.parent.name for path in folder.parent.glob("*/checkpoints"))
        suggestion = f"; give the trial_name of a run: {', '.join(others[-8:])}" if others else ""
        yield f"recover_mode=resume: no checkpoint in {folder}{suggestion}"


BUILTIN = "builtin"
"""Value of actor.path for the built-in policy, warm-started on demonstrations."""
BUILTIN_TINY = "builtin_tiny"
"""Value of actor.path for the built-in policy with random weights and one token per byte."""
BUILTIN_PATHS = (BUILTIN, BUILTIN_TINY)
"""Values of actor.path that are not the name of a folder."""
TINY_VOCAB = 260
"""Vocabulary size of ``BUILTIN_TINY``: 256 bytes and four special tokens."""
PRETRAINED = "models/smollm2_135m"
"""Folder that model=smollm2_135m uses. The path could be mistaken for a hub id."""
BUILTIN_VARIABLES = ("show_system", "show_tools")
"""Variables that the built-in policy's chat template reads."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
"""Name suffixes of embedding matrices."""


def start_untrained(config: ExperimentConfig, *, trains_on_file: bool) -> str:
    """Replace ``actor.path=builtin`` with the untrained built-in policy if the environment has no
    scripted solver for a warm start, or if the rows of a file are trained on, which the
    experiment can do if ``trains_on_file``.

    Return a warning about the replacement, or "" if nothing was changed. Experiments that need
    demonstrations raise an error themselves.
    """
    chosen: Any = getattr(config, "env", None)
    if config.actor.path == BUILTIN and config.dataset.path is not None and trains_on_file:
        config.actor.path = BUILTIN_TINY
        return (
            "actor.path names no model, so the built-in policy starts untrained, with a token for "
            "each byte. It tries the machinery; actor.path=FOLDER trains a model of your own"
        )
    if config.actor.path != BUILTIN or not hasattr(chosen, "path"):
        return ""
    try:
        spec = chosen_environment(chosen).spec
    except ValueError:
        return ""  # Reported when the experiment is built.
    if spec.demonstrate is not None or spec.demonstrations is not None:
        return ""
    config.actor.path = BUILTIN_TINY
    return (
        f"the environment {spec.name} has no scripted solver and actor.path names no model, so the "
        f"built-in policy "
        "starts untrained, with a token for each byte. It tries the machinery and learns next to "
        "nothing; "
        "actor.path=FOLDER trains a model of your own"
    )


def model_problems(
    role: str, model: ModelConfig, max_total_tokens: int, *, renders: bool = True
) -> Iterator[str]:
    """Yield the problems of a role's model folder.

    It must contain a supported decoder with a matching tokenizer and a context of at least
    ``max_total_tokens``, and a chat template if the role ``renders`` conversations. A path
    ``owner/name`` may be a hub id, which is not inspected.
    """
    folder = Path(model.path).expanduser()
    if model.path in BUILTIN_PATHS:
        if unread := [name for name in model.chat_template_kwargs if name not in BUILTIN_VARIABLES]:
            yield (
                f"{role}.chat_template_kwargs: the chat template of the built-in policy does not "
                f"read "
                f"{', '.join(unread)} (it reads {', '.join(BUILTIN_VARIABLES)})"
            )
        if problem := expert_problem({}, role, accepted=model.experts):
            yield f"{role}.path={model.path}: {problem}"
        return
    if not folder.is_dir():
        if model.path == PRETRAINED:
            yield f"{role}.path={model.path}: no such folder; run `make model` to create it"
        elif model.path.startswith((".", "/", "~")) or not re.fullmatch(
            r"[\w.-]+(/[\w.-]+)?", model.path
        ):
            yield f"{role}.path={model.path}: no such folder"
        elif "/" not in model.path:
            yield f"{role}.path={model.path}: no such folder (and a hub id has the form owner/name)"
        return
    if not (folder / "config.json").is_file():
        yield f"{role}.path={model.path}: the folder has no config.json, so it is not a model"
        return
    template = _chat_template(folder) if renders else "-"
    if not template:
        yield (
            f"{role}.path={model.path}: the tokenizer has no chat template; use an "
            f"instruction-tuned model"
        )
    elif renders and (unread := find_unread_variables(template, model.chat_template_kwargs)):
        yield (
            f"{role}.chat_template_kwargs: the chat template of {model.path} does not read "
            f"{', '.join(unread)}"
        )
    yield from _weights_problems(role, model, folder, max_total_tokens)


def is_builtin(path: str) -> bool:
    """Return whether ``path`` is a built-in policy: either its name, or the folder of a trained
    one, which is recognized by its chat template."""
    folder = Path(path).expanduser()
    return path in BUILTIN_PATHS or (
        folder.is_dir() and all(name in _chat_template(folder) for name in BUILTIN_VARIABLES)
    )


def checkpoint_problems(role: str, path: str) -> Iterator[str]:
    """Yield an error if weights are missing in a folder that contains a model's configuration."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        yield f"{role}.path={path}: the folder has no weights (*.safetensors)"
    # Check only the format that transformers would read: the folder may contain the index of
    # another format without its files.
    formats = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "*.bin"))
    single_file = next((name for name, files in formats if any(folder.glob(files))), "")
    index = folder / f"{single_file}.index.json"
    if single_file and not (folder / single_file).is_file() and index.is_file():
        weight_map = _read_json(index).get("weight_map")
        files = (
            {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
        )
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            yield (
                f"{role}.path={path}: {len(missing)} of {len(files)} files of its weights are "
                f"missing: {missing[0]}"
            )


def _weights_problems(
    role: str, model: ModelConfig, folder: Path, max_total_tokens: int
) -> Iterator[str]:
    """Yield reasons why a model cannot be trained according to its configuration, and mismatches
    between its files."""
    path = model.path
    model_config = _read_json(folder / "config.json")
    if not model_config:
        yield f"{role}.path={path}: config.json describes no model"
        return
    if problem := decoder_problem(model_config) or expert_problem(
        model_config, role, accepted=model.experts
    ):
        yield f"{role}.path={path}: {problem}"
    limit = context_limit(model_config)
    if max_total_tokens > limit:
        reason = context_reason(model_config)
        yield (
            f"rollout.max_total_tokens={max_total_tokens}: the context length of {path} is "
            f"{limit} tokens{reason}"
        )
    if (size := _vocabulary_size(folder)) is None:
        return
    vocab, added = _token_ids(folder)
    if (highest := max((*vocab.values(), *added.values()), default=-1)) >= size:
        yield (
            f"{role}.path={path}: the tokenizer has the id {highest}, the model's vocabulary "
            f"{size} tokens"
        )
    embedding_rows = (
        shape[0]
        for name, shape in tensor_shapes(folder).items()
        if name.endswith(_EMBEDDINGS) and shape
    )
    if (rows := next(embedding_rows, size)) != size:
        yield (
            f"{role}.path={path}: the checkpoint has embeddings of {rows} tokens, but "
            f"config.json has vocab_size={size}"
        )


def vocabulary_problems(
    role: str, model: ModelConfig, actor: ModelConfig, builtin_vocab: int
) -> Iterator[str]:
    """Yield an error if a role reads the actor's tokens but its vocabulary differs from the actor's
    in size or token ids, as far as both folders show it. ``builtin_vocab`` is the vocabulary size
    of the built-in policy, whose tokenizer does not exist yet."""
    folder = Path(model.path).expanduser()
    actor_folder = Path(actor.path).expanduser()
    builtin_size = {BUILTIN: builtin_vocab, BUILTIN_TINY: TINY_VOCAB}.get(actor.path)
    size = _vocabulary_size(folder)
    actor_size = builtin_size or _vocabulary_size(actor_folder)
    if size is not None and actor_size is not None and size != actor_size:
        yield (
            f"{role}.path={model.path}: its vocabulary has {size} tokens, that of "
            f"actor.path={actor.path} has "
            f"{actor_size}; the {role} reads the actor's tokens"
        )
    elif not builtin_size and (difference := _compare_token_ids(folder, actor_folder)):
        yield (
            f"{role}.path={model.path}: its tokenizer {difference} of actor.path={actor.path}; the "
            f"{role} reads the "
            "actor's tokens"
        )


def _compare_token_ids(folder: Path, other: Path) -> str:
    """Describe how the token ids of two tokenizers differ; "" if they do not differ or the files do
    not show it.

    Added tokens that only one of them has do not count as a difference.
    """
    vocab, added = _token_ids(folder)
    other_vocab, other_added = _token_ids(other)
    all_ids = {**vocab, **added}
    all_other_ids = {**other_vocab, **other_added}
    for token, number in all_ids.items():
        if all_other_ids.get(token, number) != number:
            return f"gives {token[:40]!r} the id {number}, not {all_other_ids[token]} as that"
    other_tokens = {number: token for token, number in other_vocab.items()}
    for token, number in vocab.items():
        if other_tokens.get(number, token) != token:
            return (
                f"gives the id {number} to {token[:40]!r}, not to {other_tokens[number][:40]!r} as "
                f"that"
            )
    return ""


def _token_ids(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return (token ids of the vocabulary, token ids of the added tokens) from ``tokenizer.json``;
    both are empty if it cannot be read."""
    tokenizer = _read_json(folder / "tokenizer.json")
    model = tokenizer.get("model")
    added = tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pairs: Iterable[tuple[Any, Any]] = vocab.items() if isinstance(vocab, dict) else ()
    if isinstance(vocab, list):  # Unigram models list [piece, score] in the order of the ids.
        pairs = (
            (piece[0], number)
            for number, piece in enumerate(vocab)
            if isinstance(piece, list) and piece
        )
    tokens = (
        [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    )
    return _valid_pairs(pairs), _valid_pairs(
        (token.get("content"), token.get("id")) for token in tokens
    )


def _valid_pairs(pairs: Iterable[tuple[Any, Any]]) -> dict[str, int]:
    return {
        token: number
        for token, number in pairs
        if isinstance(token, str) and isinstance(number, int)
    }


def _vocabulary_size(folder: Path) -> int | None:
    model_config = _read_json(folder / "config.json")
    text_config = model_config.get("text_config")
    size = model_config.get(
        "vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None
    )
    return size if isinstance(size, int) else None


def _chat_template(folder: Path) -> str:
    """Return the text of all chat templates of a tokenizer; "" if it has none."""
    files = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")]
    inline = _read_json(folder / "tokenizer_config.json").get("chat_template") or ""
    texts = [file.read_text(encoding="utf-8") for file in sorted(files) if file.is_file()]
    return "\n".join([*texts, inline if isinstance(inline, str) else json.dumps(inline)])


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; {} if the file is missing, is invalid or contains another
    type."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


_PACKAGE = "peft"
"""Package that implements LoRA."""
_BUILTIN_LAYERS = tuple(
    f"{part}.{name}_proj"
    for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
    for name in names
)
"""Names of the linear layers in a block of the built-in policy."""


def adapter_problems(role: str, model: ModelConfig) -> Iterator[str]:
    """Yield the reasons why LoRA cannot be used: peft is missing, the backend does not support
    adapters, or no layer matches a target, as far as the model's files show its layers."""
    lora = model.lora
    if not lora.rank:
        return
    if find_spec(_PACKAGE) is None:
        yield (
            f"{role}.lora.rank={lora.rank}: adapters need the package {_PACKAGE}: "
            f"{install_command('lora')}"
        )
    if model.backend == SHARDED:
        yield (
            f"{role}.lora.rank={lora.rank}: backend {SHARDED} cuts a model of which all weights "
            f"train; adapters train "
            "with torch on one worker, and with ddp on several"
        )
    shapes = tensor_shapes(Path(model.path).expanduser()) if model.path not in BUILTIN_PATHS else {}
    linear = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if is_block_matrix(name, shape)
    ]
    # The trainer fuses experts into one tensor.
    layers = [name for name in linear if ".experts." not in name]
    layers = _BUILTIN_LAYERS if model.path in BUILTIN_PATHS else layers
    for target in lora.targets:
        if layers and not any(name == target or name.endswith(f".{target}") for name in layers):
            names = sorted({name.rpartition(".")[2] for name in layers})
            yield (
                f"{role}.lora.targets: no linear layer of the blocks of {model.path} is called "
                f"{target!r} (there are "
                f"{', '.join(names)})"
            )
