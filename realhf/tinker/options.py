"""Settings of the training API server: the model, who may use it, and how much of the machine each
client gets."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import realhf
from realhf.base.host_resources import usable_cores
from realhf.base.loopback import is_loopback_host
from realhf.tinker.channel import ComputeOptions
from realhf.web.settings import ServerSettings, SettingError, setting
from realhf.web.tokens import read_token_lines

_FROM_ZERO = (0, math.inf)
_FROM_ONE = (1, math.inf)
_ABOVE_ZERO = (1e-3, math.inf)


@dataclass(frozen=True)
class ServerOptions(ServerSettings):
    """The settings of one server. Raises SettingError for a bad one."""

    host: str = setting(
        "127.0.0.1", "address to listen on; other than the loopback it needs --token-file"
    )
    port: int = setting(8800, "port; 0: any free one", limits=(0, 65535))
    allowed_hosts: str = setting(
        "", "names, with commas, by which clients may address a server on other addresses"
    )
    tls_cert: str = setting("", "file with the certificate (PEM), for https")
    tls_key: str = setting("", "file with its private key")
    model: str = setting(about="folder of the base model (Hugging Face format)")
    root: str = setting(
        "tinker", "folder of all kept state; a server that was killed continues from it"
    )
    name: str = setting("", "name of the model for clients, besides the path of its folder")
    token_file: str = setting(
        "", "file with one API key a line (tml-...); each key sees its own only. None: any key"
    )
    full_weights: bool = setting(
        False,
        "train all weights, on a copy of the base for each client, instead of adapters of the "
        "requested rank",
    )
    dtype: str = setting(
        "float32",
        "element type of the base model: float32 or bfloat16",
        choices=("float32", "bfloat16"),
    )
    threads: int = setting(
        0, "threads that compute; 0: as many as there are cores", limits=_FROM_ZERO
    )
    max_tokens_per_mb: int = setting(2048, "most positions of a micro-batch", limits=_FROM_ONE)
    max_sequence: int = setting(
        0, "most tokens of a sequence; 0: as many as the model takes", limits=_FROM_ZERO
    )
    kv_cache_gib: float | None = setting(
        None,
        "memory for keys and values of sampling, in GiB; none: half of the free memory",
        limits=_ABOVE_ZERO,
    )
    max_adapters: int = setting(
        16, "most models in memory at once; the others wait on the disk", limits=_FROM_ONE
    )
    max_adapters_per_key: int = setting(8, "most models in memory of one API key", limits=_FROM_ONE)
    max_rank: int = setting(128, "largest rank of an adapter", limits=_FROM_ONE)
    max_body_mib: int = setting(
        64, "largest request body, in MiB after decompression", limits=_FROM_ONE
    )
    max_pending: int = setting(2048, "most unfinished requests of one API key", limits=_FROM_ONE)
    max_pending_mib: int = setting(
        512, "most bytes of the unfinished requests of one key, in MiB", limits=_FROM_ONE
    )
    max_saved_gib: float = setting(
        64.0, "most bytes of the saved weights of one key, in GiB", limits=_ABOVE_ZERO
    )
    min_free_gib: float = setting(
        1.0,
        "free space on the disk of --root below which new requests are refused, in GiB",
        limits=_FROM_ZERO,
    )
    keep_ephemeral: int = setting(
        8, "how many weights saved without a name are kept of each model", limits=_FROM_ONE
    )
    state_every_s: float = setting(
        30.0,
        "least seconds between two saved states of a model, from which a killed server resumes",
        limits=_FROM_ZERO,
    )
    session_lapses_s: float = setting(
        900.0,
        "seconds without a heartbeat of its client after which a model leaves the memory",
        limits=_ABOVE_ZERO,
    )

    def __post_init__(self) -> None:
        if problem := self._find_model_problem() or self._find_contradiction():
            raise SettingError(problem)
        super().__post_init__()

    def _find_model_problem(self) -> str:
        if (Path(self.model) / "config.json").is_file():
            return ""
        what = (
            "there is no config.json in that folder"
            if Path(self.model).is_dir()
            else "there is no such folder"
        )
        return f"--model {self.model}: {what}; run `make model` to create models/smollm2_135m"

    def _find_contradiction(self) -> str:
        """Return an error text if settings contradict each other; "" otherwise."""
        if self.full_weights and self.dtype != "float32":
            return (
                f"--full-weights trains in float32: --dtype {self.dtype} is for the base of "
                f"adapters"
            )
        if self.full_weights and self.max_rank != ServerOptions.max_rank:
            return "--max-rank has no effect with --full-weights: there are no adapters"
        if self.allowed_hosts and is_loopback_host(self.host):
            return "--allowed-hosts has no effect on the loopback"
        return ""

    @property
    def asks_for_token(self) -> bool:
        """Whether clients need a known API key."""
        return bool(self.token_file)

    @property
    def token_names(self) -> str:
        """Names, for error messages, of the settings that let the server listen beyond the loopback
        interface."""
        return self.setting_label("token_file")

    def api_keys(self) -> frozenset[str]:
        """Return the API keys that may use this server; an empty set means that any key may. Raises
        SettingError for a file that is missing or empty, or that other users may read."""
        if not self.token_file:
            return frozenset()
        flag = self.flag("token_file")
        lines = read_token_lines(self.token_file, flag, private=True)
        keys = frozenset(line for line in lines if line and not line.startswith("#"))
        if not keys or any(not key.startswith("tml-") or len(key) < 20 for key in keys):
            raise SettingError(
                f"{flag} {self.token_file}: it needs keys that begin with tml- and have 20 letters "
                f"or more"
            )
        return keys

    @property
    def names(self) -> frozenset[str]:
        """Names by which clients may request the base model."""
        folder = os.path.abspath(self.model)
        return frozenset({self.model, folder, os.path.basename(folder), self.name} - {""})

    @property
    def public_name(self) -> str:
        """Name of the base model that clients are given. The client's own ``get_tokenizer`` finds
        the tokenizer by this name."""
        return os.path.abspath(self.model)

    def compute(self) -> ComputeOptions:
        """Return the options of the compute process."""
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


def command_line() -> argparse.ArgumentParser:
    """Return the parser of ``train-api``."""
    parser = argparse.ArgumentParser(
        prog="train-api",
        description="Serve the training API of the client tinker: loops written for it train and "
        "sample here.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"train-api {realhf.__version__}",
        help="print the version and exit",
    )
    ServerOptions.add_arguments(parser)
    return parser


def read_options(arguments: Sequence[str] | None) -> ServerOptions:
    """Return the settings of a command line. Raises SettingError."""
    return ServerOptions.resolve(command_line().parse_args(arguments))
