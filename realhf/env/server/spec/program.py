"""Puts the server of any environment of the registry together."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace

from realhf.env.doors.load import build_environment
from realhf.env.doors.options import parse_options
from realhf.env.server.config import ConfigError, ServerConfig
from realhf.env.server.spec.config import SpecServerConfig
from realhf.env.server.spec.place import keep_this_process
from realhf.env.server.spec.served import SpecServed

ABOUT = "Serve episodes of an environment over the OpenEnv wire, an instance for each session."
_LOG = logging.getLogger(__name__)


def prepare(arguments: argparse.Namespace, config: ServerConfig) -> tuple[SpecServed, ServerConfig]:
    """Return the environment as the server sees it, and the settings, with no more sessions than the environment
    allows. Raises ConfigError that names what is wrong with the environment or its options."""
    assert isinstance(config, SpecServerConfig)
    keep_this_process()
    try:
        spec = build_environment(arguments.env, parse_options(arguments.option))
        if spec.concurrency is not None and spec.concurrency < config.pool_size:
            _LOG.warning("%s allows %d instances at once, so there are no more sessions", spec.name, spec.concurrency)
            config = replace(config, pool_size=spec.concurrency)
        return SpecServed(spec, config), config
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--env {arguments.env}: {error}") from error
