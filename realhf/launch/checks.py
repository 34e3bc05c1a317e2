"""Checks before any process starts what a configuration and the folder of its model must hold, without torch.

Ranges and choices stand at the fields of the configuration, and sections check what is theirs
(``realhf/api/option.py``); here are the checks across sections.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile
from typing import Any

from realhf.api.chat_template import unread_variables
from realhf.api.config import ConfigError, ExperimentConfig, ModelConfig, RecoverMode, TeacherConfig, run_folder
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
from realhf.launch.plugins import definition_of
from realhf.registry import registered_names
from realhf.scheduler.gpus import visible_gpus


def check_config(config: ExperimentConfig) -> None:
    """Raise ConfigError that lists everything wrong with the values themselves. The experiment's module is imported
    already: names that it registers are known."""
    found = [
        *problems(config, known=registered_names),
        *_sampling(config),
        *_names_and_workers(config),
        *_sizes(config),
        *model_problems("actor", config.actor, config.rollout.max_total_tokens),
        *checkpoint_problems("actor", config.actor.path),
        *adapter_problems("actor", config.actor),
        *_served_experts(config),
        *_other_models(config),
        *_not_here(config),
    ]
    if found:
        raise ConfigError("\n".join(found))


def _other_models(config: ExperimentConfig) -> Iterator[str]:
    """Sections of an experiment that are models, too, such as a critic; their path may name the actor's weights."""
    for role, model in sections(config):
        if isinstance(model, ModelConfig) and role != "actor" and model.path not in ("", "actor", *BUILTIN_PATHS):
            yield from model_problems(role, model, config.rollout.max_total_tokens, renders=False)
            yield from checkpoint_problems(role, model.path)
            yield from vocabulary_problems(role, model, config.actor, config.builtin.vocab_size)
        if isinstance(model, TeacherConfig) and model.path:
            described = _json(Path(model.path).expanduser() / "config.json")
            frozen = ModelConfig(path=model.path, experts=bool(routed_experts(described)))
            yield from model_problems(role, frozen, config.rollout.max_total_tokens, renders=False)
            yield from checkpoint_problems(role, model.path)
            yield from vocabulary_problems(role, frozen, config.actor, config.builtin.vocab_size)


def _served_experts(config: ExperimentConfig) -> Iterator[str]:
    if config.actor.experts and config.engine.name == "vllm":
        yield (
            "actor.experts=true: vLLM keeps a tensor for each expert and the trainer one for all of them, so new "
            "weights would not fit; use engine.name=embedded"
        )


def _not_here(config: ExperimentConfig) -> Iterator[str]:
    """What a run would miss on this machine after its first minutes: vLLM, a tracker, a folder that can be written."""
    engine = config.engine
    elsewhere = definition_of(config.scheduler.path).several_hosts
    if (
        engine.name == "vllm"
        and engine.vllm_url is None
        and not elsewhere
        and not which(os.path.expanduser(engine.vllm_executable))
    ):
        yield (
            f"engine.vllm_executable={engine.vllm_executable}: no such program here, so engine.name=vllm starts no "
            "server; install vLLM in an environment of its own and name its program, or a server that runs with "
            "engine.vllm_url"
        )
    for name in config.monitor.trackers:
        if find_spec(name) is None:
            yield f"monitor.trackers: {name} is not installed: {install_command(name)}"
    there = run_folder(config)
    while not os.path.exists(there):  # Path.exists raises where a folder above cannot be looked into
        there = there.parent
    try:
        TemporaryFile(dir=there).close()
    except OSError as error:
        yield f"fileroot: cannot write to {there}: {error.strerror}"


def _sampling(config: ExperimentConfig) -> Iterator[str]:
    for cut in config.gen.truncations():
        yield (
            f"gen.{cut}: tokens would be drawn from a cut distribution and trained with the log-probabilities of "
            "the whole one; training samples with top_p=1, top_k=0 and min_new_tokens=0"
        )


def _names_and_workers(config: ExperimentConfig) -> Iterator[str]:
    for role, workers in (("actor", config.actor.workers), ("ref", config.ref.workers)):
        if not workers or min(workers) < 0 or len(set(workers)) < len(workers):
            yield f"{role}.workers={workers}: give different indices of model workers, from 0"
    for option, text in (("experiment_name", config.experiment_name), ("trial_name", config.trial_name)):
        if not re.fullmatch(r"[\w.-]+", text) or text.startswith("."):
            yield f"{option}={_shortened(text)!r}: use letters, digits, '_', '-' and '.'; it names a folder"
    yield from _too_long(config)


def _too_long(config: ExperimentConfig) -> Iterator[str]:
    """Say which names of folders are longer than the file system takes, and whether their path is."""
    folder = run_folder(config)
    there = next(path for path in folder.parents if os.path.isdir(path))
    most = os.pathconf(there, "PC_NAME_MAX")
    parts = [("fileroot", part) for part in folder.parts[:-2]]
    for option, text in (*parts, ("experiment_name", config.experiment_name), ("trial_name", config.trial_name)):
        size = len(os.fsencode(text))
        if size > most:
            named = f"{option}={_shortened(text)}: a name of {size} bytes"
            yield f"{named}; the file system of {there} takes {most} at most"
            return
    room = os.pathconf(there, "PC_PATH_MAX") - _INSIDE_BYTES
    if len(os.fsencode(folder)) > room:
        yield f"fileroot={_shortened(config.fileroot)}: the run folder's path has more than {room} bytes; shorten it"


_INSIDE_BYTES = 512
"""Paths of files in a run folder are at most so much longer than its own."""


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _sizes(config: ExperimentConfig) -> Iterator[str]:
    heads, hidden = config.builtin.num_heads, config.builtin.hidden_size
    if config.actor.path in BUILTIN_PATHS:
        if heads < 1 or hidden % heads or (hidden // heads) % 2:
            yield f"builtin.hidden_size={hidden}: must be num_heads={heads} times an even head width"
        if config.rollout.max_total_tokens > config.builtin.max_positions:
            yield (
                f"rollout.max_total_tokens={config.rollout.max_total_tokens}: the built-in policy has "
                f"builtin.max_positions={config.builtin.max_positions}"
            )
    folder = run_folder(config)
    # Path.is_dir raises where the name is too long, which is said elsewhere.
    if config.recover_mode is RecoverMode.resume and not os.path.isdir(folder / "checkpoints"):
        others = sorted(path.parent.name for path in folder.parent.glob("*/checkpoints"))
        named = f"; give the trial_name of a run: {', '.join(others[-8:])}" if others else ""
        yield f"recover_mode=resume: no checkpoint in {folder}{named}"


BUILTIN, BUILTIN_TINY = "builtin", "builtin_tiny"
BUILTIN_PATHS = (BUILTIN, BUILTIN_TINY)
"""Values of actor.path that name no folder: the policy made from demonstrations, and one made from nothing, with a
token for each byte and random weights."""
TINY_VOCAB = 260
"""Number of tokens of the second one: every byte, and four special tokens."""
PRETRAINED = "models/smollm2_135m"
"""The folder of model=smollm2_135m, which could be a hub id by its looks."""
VLLM_START_S = 600.0
"""How long a vLLM server may take to load a model, compile and capture graphs, where it was chosen for the person."""
BUILTIN_VARIABLES = ("show_system", "show_tools")
"""What the chat template of the built-in policy reads."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")


def start_untrained(config: ExperimentConfig) -> str:
    """Let the built-in policy start untrained where the environment has no scripted solver to learn from. Returns what
    is to be said about it, empty where there is nothing to say. Experiments that need demonstrations say so
    themselves."""
    chosen: Any = getattr(config, "env", None)
    if config.actor.path != BUILTIN or not hasattr(chosen, "path"):
        return ""
    try:
        spec = chosen_environment(chosen).spec
    except ValueError:
        return ""  # Said when the experiment is built.
    if spec.demonstrate is not None or spec.demonstrations is not None:
        return ""
    config.actor.path = BUILTIN_TINY
    return (
        f"the environment {spec.name} has no scripted solver and actor.path names no model, so the built-in policy "
        "starts untrained, with a token for each byte. It tries the machinery and learns next to nothing; "
        "actor.path=FOLDER trains a model of your own"
    )


def choose_engine(config: ExperimentConfig, given: Collection[str]) -> str:
    """Let vLLM sample the tokens of a pretrained model where this machine shows a GPU and has vLLM, unless the options
    ``given`` choose an engine. Returns what is to be said about the embedded engine on a GPU, empty where there is
    nothing to say."""
    engine, path = config.engine, config.actor.path
    if {"engine.name", "engine.kv_cache_gib"} & {*given} or path in BUILTIN_PATHS or not visible_gpus():
        return ""
    slow = (
        "engine.name=embedded copies all keys and values of a row for every token that it samples on a GPU, so that "
        "generation is many times as slow as with vLLM"
    )
    if config.actor.experts:
        return f"{slow}, which takes no weights of experts from the trainer"
    if len(config.actor.workers) > 1:
        return f"{slow}, which serves an actor of several workers in asynchronous experiments only (engine.name=vllm)"
    if engine.vllm_url is None and shutil.which(str(Path(engine.vllm_executable).expanduser())) is None:
        return f"{slow}, which is not here (engine.vllm_executable={engine.vllm_executable}): install it"
    engine.name = "vllm"
    if "rpc.connect_timeout_s" not in given:
        config.rpc.connect_timeout_s = max(VLLM_START_S, config.rpc.connect_timeout_s)
    return ""


def model_problems(role: str, model: ModelConfig, max_total_tokens: int, *, renders: bool = True) -> Iterator[str]:
    """A folder must hold a dense decoder whose tokenizer fits to it and has a chat template (where the role ``renders``
    texts), and whose context holds ``max_total_tokens``; ``owner/name`` may be a hub id, which is not looked into."""
    folder = Path(model.path).expanduser()
    if model.path in BUILTIN_PATHS:
        if idle := [name for name in model.chat_template_kwargs if name not in BUILTIN_VARIABLES]:
            yield (
                f"{role}.chat_template_kwargs: the chat template of the built-in policy does not read "
                f"{', '.join(idle)} (it reads {', '.join(BUILTIN_VARIABLES)})"
            )
        if problem := expert_problem({}, role, accepted=model.experts):
            yield f"{role}.path={model.path}: {problem}"
        return
    if not folder.is_dir():
        if model.path == PRETRAINED:
            yield f"{role}.path={model.path}: no such folder; `make model` makes it"
        elif model.path.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model.path):
            yield f"{role}.path={model.path}: no such folder"
        elif "/" not in model.path:
            yield f"{role}.path={model.path}: no such folder (and a hub id reads owner/name)"
        return
    if not (folder / "config.json").is_file():
        yield f"{role}.path={model.path}: the folder holds no config.json, so no model"
        return
    template = _chat_template(folder) if renders else "-"
    if not template:
        yield f"{role}.path={model.path}: the tokenizer has no chat template; use an instruction-tuned model"
    elif renders and (idle := unread_variables(template, model.chat_template_kwargs)):
        yield f"{role}.chat_template_kwargs: the chat template of {model.path} does not read {', '.join(idle)}"
    yield from _weights_problems(role, model, folder, max_total_tokens)


def is_builtin(path: str) -> bool:
    """Whether ``actor.path`` means the built-in policy: by its name, or the folder of one that has trained already,
    which is known by its chat template."""
    folder = Path(path).expanduser()
    return path in BUILTIN_PATHS or (
        folder.is_dir() and all(name in _chat_template(folder) for name in BUILTIN_VARIABLES)
    )


def checkpoint_problems(role: str, path: str) -> Iterator[str]:
    """A folder with a model's configuration must hold its weights, all files of them."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        yield f"{role}.path={path}: the folder holds no weights (*.safetensors)"
    # Only what transformers reads: a folder may keep the index of another format, whose files were left out.
    formats = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "*.bin"))
    whole = next((name for name, files in formats if any(folder.glob(files))), "")
    index = folder / f"{whole}.index.json"
    if whole and not (folder / whole).is_file() and index.is_file():
        listed = _json(index).get("weight_map")
        files = {str(name) for name in listed.values()} if isinstance(listed, dict) else set()
        if lacking := sorted(name for name in files if not (folder / name).is_file()):
            yield f"{role}.path={path}: {len(lacking)} of {len(files)} files of its weights are missing: {lacking[0]}"


def _weights_problems(role: str, model: ModelConfig, folder: Path, max_total_tokens: int) -> Iterator[str]:
    """What the configuration of a model says against it, and what does not fit together in its folder."""
    path = model.path
    described = _json(folder / "config.json")
    if not described:
        yield f"{role}.path={path}: config.json describes no model"
        return
    if problem := decoder_problem(described) or expert_problem(described, role, accepted=model.experts):
        yield f"{role}.path={path}: {problem}"
    limit = context_limit(described)
    if max_total_tokens > limit:
        reason = context_reason(described)
        yield f"rollout.max_total_tokens={max_total_tokens}: the context of {path} holds {limit} tokens{reason}"
    if (size := _vocabulary(folder)) is None:
        return
    words, added = _ids(folder)
    if (highest := max((*words.values(), *added.values()), default=-1)) >= size:
        yield f"{role}.path={path}: the tokenizer has the id {highest}, the model's vocabulary {size} tokens"
    embedded = (shape[0] for name, shape in tensor_shapes(folder).items() if name.endswith(_EMBEDDINGS) and shape)
    if (rows := next(embedded, size)) != size:
        yield f"{role}.path={path}: the checkpoint embeds {rows} tokens, config.json says vocab_size={size}"


def vocabulary_problems(role: str, model: ModelConfig, actor: ModelConfig, builtin_vocab: int) -> Iterator[str]:
    """A role that reads the actor's tokens must have as many, and a tokenizer of its own must give them the same ids,
    as far as both folders say. ``builtin_vocab``: the number of tokens of the built-in policy, whose tokenizer is yet
    to be made."""
    folder, other = (Path(every.path).expanduser() for every in (model, actor))
    made_here = {BUILTIN: builtin_vocab, BUILTIN_TINY: TINY_VOCAB}.get(actor.path)
    size, wanted = _vocabulary(folder), made_here or _vocabulary(other)
    if size is not None and wanted is not None and size != wanted:
        yield (
            f"{role}.path={model.path}: its vocabulary has {size} tokens, that of actor.path={actor.path} has "
            f"{wanted}; the {role} reads the actor's tokens"
        )
    elif not made_here and (difference := _other_ids(folder, other)):
        yield (
            f"{role}.path={model.path}: its tokenizer {difference} of actor.path={actor.path}; the {role} reads the "
            "actor's tokens"
        )


def _other_ids(folder: Path, other: Path) -> str:
    """How the ids of two tokenizers differ, empty if they do not, or where that cannot be said. Tokens that one of them
    added are not missed in the other."""
    words, added = _ids(folder)
    others, added_others = _ids(other)
    mine, theirs = {**words, **added}, {**others, **added_others}
    for word, number in mine.items():
        if theirs.get(word, number) != number:
            return f"gives {word[:40]!r} the id {number}, not {theirs[word]} as that"
    at = {number: word for word, number in others.items()}
    for word, number in words.items():
        if at.get(number, word) != word:
            return f"gives the id {number} to {word[:40]!r}, not to {at[number][:40]!r} as that"
    return ""


def _ids(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of the words of ``tokenizer.json``, and of the tokens added to them; empty where that cannot be said."""
    held = _json(folder / "tokenizer.json")
    model, added = held.get("model"), held.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    pairs: Iterable[tuple[Any, Any]] = words.items() if isinstance(words, dict) else ()
    if isinstance(words, list):  # Pieces with their scores, in the order of their ids.
        pairs = ((piece[0], number) for number, piece in enumerate(words) if isinstance(piece, list) and piece)
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return _whole(pairs), _whole((token.get("content"), token.get("id")) for token in tokens)


def _whole(pairs: Iterable[tuple[Any, Any]]) -> dict[str, int]:
    return {word: number for word, number in pairs if isinstance(word, str) and isinstance(number, int)}


def _vocabulary(folder: Path) -> int | None:
    held = _json(folder / "config.json")
    inner = held.get("text_config")
    size = held.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else None


def _chat_template(folder: Path) -> str:
    """The text of all chat templates of a tokenizer; empty if there is none."""
    files = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")]
    held = _json(folder / "tokenizer_config.json").get("chat_template") or ""
    texts = [file.read_text(encoding="utf-8") for file in sorted(files) if file.is_file()]
    return "\n".join([*texts, held if isinstance(held, str) else json.dumps(held)])


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


_PACKAGE = "peft"
_BUILTIN_LAYERS = tuple(
    f"{part}.{name}_proj" for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))) for name in names
)
"""Linear layers of a block of the built-in policy."""


def adapter_problems(role: str, model: ModelConfig) -> Iterator[str]:
    """Adapters need peft, a backend that knows them, and layers with the names of their targets, as far as the files of
    the model say what it has."""
    lora = model.lora
    if not lora.rank:
        return
    if find_spec(_PACKAGE) is None:
        yield f"{role}.lora.rank={lora.rank}: adapters need the package {_PACKAGE}: {install_command('lora')}"
    if model.backend == SHARDED:
        yield (
            f"{role}.lora.rank={lora.rank}: backend {SHARDED} cuts a model of which all weights train; adapters train "
            "with torch on one worker, and with ddp on several"
        )
    shapes = tensor_shapes(Path(model.path).expanduser()) if model.path not in BUILTIN_PATHS else {}
    linear = [name.removesuffix(".weight") for name, shape in shapes.items() if is_block_matrix(name, shape)]
    layers = [name for name in linear if ".experts." not in name]  # those are parts of one tensor in the trainer
    layers = _BUILTIN_LAYERS if model.path in BUILTIN_PATHS else layers
    for target in lora.targets:
        if layers and not any(name == target or name.endswith(f".{target}") for name in layers):
            there = sorted({name.rpartition(".")[2] for name in layers})
            yield (
                f"{role}.lora.targets: no linear layer of the blocks of {model.path} is called {target!r} (there are "
                f"{', '.join(there)})"
            )
