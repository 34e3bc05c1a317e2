"""Builds the interfaces of the calls that a worker may get."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from realhf.api.mfc import MFCDef
from realhf.builtins import interfaces
from realhf.dataflow.model_host import interface_key


def call_interfaces(mfcs: Iterable[MFCDef]) -> dict[str, tuple[MFCDef, Any]]:
    """Return for the name of each call the call and its interface.

    Calls of one role with the same interface and the same arguments share one object, so what one of them learns the
    others know: a critic's inference predicts in the units that its training measured.
    """
    shared: dict[str, Any] = {}
    found = {}
    for mfc in mfcs:
        key = json.dumps([mfc.model_role, interface_key(mfc.interface, mfc.interface_args)])
        if key not in shared:
            shared[key] = interfaces.get(mfc.interface)(**mfc.interface_args)
        found[mfc.name] = (mfc, shared[key])
    return found
