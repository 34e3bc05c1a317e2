"""What the folder of a model must hold, read without torch or transformers before any process starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from realhf.api.chat import unread_variables
from realhf.api.config import ExperimentConfig, ModelConfig
from realhf.base.context_limit import context_limit, context_reason
from realhf.base.decoder_kind import decoder_problem
from realhf.base.model_size import tensor_shapes
from realhf.env.loader.load import chosen_environment
from realhf.scheduler.gpus import visible_gpus

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
    yield from _weights_problems(role, model.path, folder, max_total_tokens)


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


def _weights_problems(role: str, path: str, folder: Path, max_total_tokens: int) -> Iterator[str]:
    """What the configuration of a model says against it, and what does not fit together in its folder."""
    described = _json(folder / "config.json")
    if not described:
        yield f"{role}.path={path}: config.json describes no model"
        return
    if problem := decoder_problem(described):
        yield f"{role}.path={path}: {problem}"
    limit = context_limit(described)
    if max_total_tokens > limit:
        reason = context_reason(described)
        yield f"rollout.max_total_tokens={max_total_tokens}: the context of {path} holds {limit} tokens{reason}"
    if (size := _vocabulary(folder)) is None:
        return
    if (highest := _highest_id(folder)) >= size:
        yield f"{role}.path={path}: the tokenizer has the id {highest}, the model's vocabulary {size} tokens"
    rows = _embedding_rows(folder)
    if rows is not None and rows != size:
        yield f"{role}.path={path}: the checkpoint embeds {rows} tokens, config.json says vocab_size={size}"


def _highest_id(folder: Path) -> int:
    """The highest token id of ``tokenizer.json``; -1 where that cannot be said."""
    words, added = _ids(folder)
    return max((*words.values(), *added.values()), default=-1)


def _embedding_rows(folder: Path) -> int | None:
    """How many tokens the checkpoint embeds; None where that cannot be said."""
    rows = (shape[0] for name, shape in tensor_shapes(folder).items() if name.endswith(_EMBEDDINGS) and shape)
    return next(rows, None)


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
