"""Puts the server of any environment of the registry together."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from realhf.builtins import environments
from realhf.env.doors.load import build_environment
from realhf.env.doors.options import parse_options
from realhf.env.server.config import ConfigError, ServerConfig
from realhf.env.server.served import Player
from realhf.env.server.spec.config import SpecServerConfig
from realhf.env.server.spec.host import Host
from realhf.env.server.spec.place import keep_this_process
from realhf.env.server.spec.places import Places
from realhf.env.server.spec.processes import Processes
from realhf.env.server.spec.served import SpecServed

ABOUT = "Serve episodes of an environment over the OpenEnv wire, an instance for each session."
PROCESSES = 4
"""In so many processes an author's environment lives, unless the server is told otherwise."""
_LOG = logging.getLogger(__name__)


def prepare(arguments: argparse.Namespace, config: ServerConfig) -> tuple[SpecServed, ServerConfig]:
    """Return the environment as the server sees it, and the settings, with no more sessions than the environment
    allows. Raises ConfigError that names what is wrong with the environment or its options."""
    assert isinstance(config, SpecServerConfig)
    count = config.processes if config.processes >= 0 else 0 if arguments.env in environments else PROCESSES
    pool: Places | Processes
    player: Callable[[Any], Player]
    try:
        options = parse_options(arguments.option)
        if count:
            size, timeout_s, count = config.pool_size, config.call_timeout_s, min(count, config.pool_size)
            pool = Processes(arguments.env, options, count, size, timeout_s, info=config.info)
            facts, player = pool.facts, lambda slot: slot
        else:
            keep_this_process()
            spec = build_environment(arguments.env, options)
            host = Host(spec, config.pool_size, config.call_timeout_s, info=config.info)
            facts, pool, player = host.facts, host.places, host.player
    except ValueError as error:
        raise ConfigError(f"--env {arguments.env}: {error}") from error
    if facts.concurrency is not None and facts.concurrency < config.pool_size:
        _LOG.warning("%s allows %d instances at once, so there are no more sessions", facts.name, facts.concurrency)
        config = replace(config, pool_size=facts.concurrency)
        pool.size = config.pool_size
    return SpecServed(facts, pool, player, config), config
