"""What the server is told at its start: the model, where it listens, who may use it, and how much."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import realhf
from realhf.base.host_resources import usable_cores
from realhf.base.loopback import is_loopback_host
from realhf.tinker.channel import ComputeOptions


class OptionError(ValueError):
    """An option is wrong; the text names it."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ServerOptions:
    """The options of one server; on the command line with dashes. Raises OptionError that names a bad one."""

    model: str = field(metadata={"help": "folder of the base model (Hugging Face format)"})
    root: str = _option("tinker", "folder of everything that is kept; the same one continues what was killed")
    name: str = _option("", "name of the model for clients, beside the path of its folder")
    host: str = _option("127.0.0.1", "address to listen on; other than the loopback it needs --token-file")
    port: int = _option(8800, "port; 0: any free one")
    token_file: str = _option("", "file with one API key a line (tml-...); each key sees its own only. None: any key")
    allowed_hosts: str = _option("", "names, with commas, by which clients may address a server on other addresses")
    tls_cert: str = _option("", "file with the certificate (PEM), for https")
    tls_key: str = _option("", "file with its private key")
    full_weights: bool = _option(
        False, "clients train all weights, each those of a copy of the base, and no adapters of the rank they ask for"
    )
    dtype: str = _option("float32", "element type of the base model: float32 or bfloat16")
    threads: int = _option(0, "threads that compute; 0: as many as there are cores")
    max_tokens_per_mb: int = _option(2048, "a micro-batch has at most so many positions")
    max_sequence: int = _option(0, "a sequence has at most so many tokens; 0: as many as the model takes")
    kv_cache_gib: float | None = _option(
        None, "memory of sampling for keys and values, in GiB; none: half of what is free"
    )
    max_adapters: int = _option(16, "so many models that clients train are in memory at once; others wait on the disk")
    max_adapters_per_key: int = _option(8, "so many of them belong to one key")
    max_rank: int = _option(128, "adapters have at most this rank")
    max_body_mib: int = _option(64, "a request has at most so many MiB, once inflated")
    max_pending: int = _option(2048, "so many requests of one key may be in work")
    max_pending_mib: int = _option(512, "and have so many MiB together")
    max_saved_gib: float = _option(64.0, "weights that a key has saved may take so many GiB")
    min_free_gib: float = _option(1.0, "nothing new is taken while the disk of --root has less left, in GiB")
    keep_ephemeral: int = _option(8, "weights that were saved without a name: so many are kept of each model")
    state_every_s: float = _option(30.0, "at most so often the state of a model is saved, to begin from when killed")
    session_lapses_s: float = _option(900.0, "without a sign of its client for so long, a model leaves the memory")

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise OptionError(problem)

    def _problem(self) -> str:
        if not (Path(self.model) / "config.json").is_file():
            what = "there is no config.json in that folder" if Path(self.model).is_dir() else "there is no such folder"
            return f"--model {self.model}: {what}; `make model` makes models/smollm2_135m"
        if not is_loopback_host(self.host) and not self.token_file:
            return f"--host {self.host} lets others in: give --token-file"
        if bool(self.tls_cert) != bool(self.tls_key):
            return "--tls-cert and --tls-key go together"
        if self.dtype not in ("float32", "bfloat16"):
            return f"--dtype {self.dtype} is neither float32 nor bfloat16"
        if self.full_weights and self.dtype != "float32":
            return f"--full-weights trains in float32: --dtype {self.dtype} is for the base of adapters"
        if self.full_weights and self.max_rank != ServerOptions.max_rank:
            return "--max-rank has no effect with --full-weights: there are no adapters"
        if self.allowed_hosts and is_loopback_host(self.host):
            return "--allowed-hosts has no effect on the loopback"
        least = {"threads": 0, "port": 0, "max_sequence": 0, "state_every_s": 0, "min_free_gib": 0}
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) in (int, float) and not value >= least.get(each.name, 1e-3):
                return f"{flag(each.name)} {value} is out of range"
        return ""

    def api_keys(self) -> frozenset[str]:
        """Return the keys that may use this server; none: any may. Raises OptionError for a file that is not there,
        empty, or that others may read."""
        if not self.token_file:
            return frozenset()
        path = Path(self.token_file)
        try:
            if path.stat().st_mode & 0o077:
                raise OptionError(f"--token-file {path}: others may read it; chmod 600")
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise OptionError(f"--token-file {path}: {error.strerror}") from None
        keys = frozenset(line for line in lines if line and not line.startswith("#"))
        if not keys or any(not key.startswith("tml-") or len(key) < 20 for key in keys):
            raise OptionError(f"--token-file {path}: it needs keys that begin with tml- and have 20 letters or more")
        return keys

    @property
    def names(self) -> frozenset[str]:
        """What clients may call the base model."""
        folder = os.path.abspath(self.model)
        return frozenset({self.model, folder, os.path.basename(folder), self.name} - {""})

    @property
    def public_name(self) -> str:
        """What clients are told: a name by which the client's own ``get_tokenizer`` finds the tokenizer here."""
        return os.path.abspath(self.model)

    def compute(self) -> ComputeOptions:
        """Return the part of the process that computes."""
        threads = self.threads or usable_cores()
        return ComputeOptions(
            os.path.abspath(self.model),
            self.dtype,
            threads,
            self.max_tokens_per_mb,
            self.max_sequence,
            self.kv_cache_gib,
            self.full_weights,
        )


def flag(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.replace('_', '-')}"


def command_line() -> argparse.ArgumentParser:
    """Make the parser of ``train-api``."""
    parser = argparse.ArgumentParser(
        prog="train-api",
        description="Serve the training API of the client tinker: loops written for it train and sample here.",
    )
    parser.add_argument(
        "--version", action="version", version=f"train-api {realhf.__version__}", help="print the version and exit"
    )
    kinds: Mapping[str, type] = {"int": int, "float": float, "float | None": float, "str": str}
    for each in fields(ServerOptions):
        if each.type == "bool":
            parser.add_argument(flag(each.name), action="store_true", help=each.metadata["help"])
            continue
        required = each.default is MISSING
        shown = "" if required or each.default in ("", None) else f" (default {each.default})"
        parser.add_argument(
            flag(each.name),
            type=kinds[str(each.type)],
            required=required,
            default=None if required else each.default,
            help=each.metadata["help"] + shown,
        )
    return parser


def options_of(arguments: Sequence[str] | None) -> ServerOptions:
    """Read a command line. Raises OptionError."""
    return ServerOptions(**vars(command_line().parse_args(arguments)))
