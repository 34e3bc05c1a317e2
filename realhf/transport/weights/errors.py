"""Defines what can go wrong when weights travel. Every message names the version and the medium."""

from __future__ import annotations

from realhf.api.generation import WeightsManifest
from realhf.transport.errors import TransportError


class WeightsError(TransportError):
    """Is raised when the weights of a manifest did not arrive, or not as the manifest says. Nothing was handed out."""

    def __init__(self, manifest: WeightsManifest, reason: str) -> None:
        super().__init__(f"weights version {manifest.version} by {manifest.medium}: {reason}")
        self.version = manifest.version
        self.medium = manifest.medium


class WeightsGone(WeightsError):
    """Is raised when the publisher no longer serves this version (or has ended): ask for the newest manifest."""


class WeightsTimeout(WeightsError, TimeoutError):
    """Is raised when the deadline passed before the weights were complete."""
