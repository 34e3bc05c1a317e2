"""What can go wrong when weights travel. Every message names the version and the medium."""

from __future__ import annotations

from realhf.api.generation import WeightsManifest
from realhf.transport.errors import TransportError


class WeightsError(TransportError):
    """The weights of a manifest did not arrive, or not as the manifest says. Nothing was handed out."""

    def __init__(self, manifest: WeightsManifest, reason: str) -> None:
        super().__init__(f"weights version {manifest.version} by {manifest.medium}: {reason}")
        self.version = manifest.version
        self.medium = manifest.medium


class WeightsGone(WeightsError):
    """The publisher serves this version no more (or has ended): ask for the newest manifest."""


class WeightsTimeout(WeightsError, TimeoutError):
    """The deadline passed before the weights were complete."""
