"""Tries the layers of a pool's processes before anything is served, and judges the result; the owner's side of the
probe."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from realhf.env.containment.fork_server import ForkServer
from realhf.env.containment.frames import BadFrame, receive_frame
from realhf.env.containment.installed import NotContained
from realhf.env.containment.probe import PROBE, Attempt, ProbeTargets
from realhf.env.containment.process_guard import NETWORK
from realhf.env.containment.sandbox import own_package

SIMULATORS, WORKERS = "simulators", "CLI workers"
_FOLDERS = {SIMULATORS: "simulators", WORKERS: "files"}
_PROBE_S = 30.0


def probe_layers(zygotes: Mapping[str, ForkServer], root: Path, layers: Sequence[str]) -> dict[str, list[Attempt]]:
    """Return what a throw-away child of each zygote could do, by the zygote's name. ``root`` is the pool's folder.
    Raises NotContained for a probe that does not answer."""
    secret = root / "host-file"
    secret.write_text("a file of the host")
    found: dict[str, list[Attempt]] = {}
    with socket.create_server(("127.0.0.1", 0)) as canary:
        port = canary.getsockname()[1]
        for kind, zygote in zygotes.items():
            made = Path(own_package()) / f"{root.name}-probe"
            targets = ProbeTargets(port, str(secret), str(made), str(root / _FOLDERS[kind] / "probe"), tuple(layers))
            found[kind] = _probe(zygote, kind, targets)
            if os.path.lexists(made):  # a read-only file system refuses to remove even what is not there
                made.unlink(missing_ok=True)
            if NETWORK in layers and select.select([canary], [], [], 0)[0]:
                canary.accept()[0].close()
                found[kind].append(Attempt(NETWORK, "connect to the host", False, "the listener was called"))
    return found


def _probe(zygote: ForkServer, kind: str, targets: ProbeTargets) -> list[Attempt]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = zygote.fork({PROBE: asdict(targets)}, [theirs.fileno()], f"containment probe of the {kind}", _PROBE_S)
        theirs.close()
        try:
            answer = receive_frame(ours, _PROBE_S)
        except (TimeoutError, BadFrame) as error:
            reason = str(error) or f"no answer within {_PROBE_S:g} s"
            raise NotContained(f"the containment probe of the {kind} failed: {reason}") from error
        finally:
            child.kill()
    return [Attempt(**attempt) for attempt in answer["attempts"]]


def judge(
    found: Mapping[str, Sequence[Attempt]],
    layers: Sequence[str],
    may_lack: frozenset[str],
    option: str = "--may-lack",
) -> dict[str, str]:
    """Return a line per layer of what was observed. Raises NotContained for one that was not tried or does not hold,
    unless it is among ``may_lack``, which is what ``option`` sets."""
    lines: dict[str, str] = {}
    for layer in layers:
        attempts = [(kind, attempt) for kind, of_kind in found.items() for attempt in of_kind if attempt.layer == layer]
        untried = sorted(set(found) - {kind for kind, _ in attempts})
        failures = [f"{kind} could {attempt.act} ({attempt.how})" for kind, attempt in attempts if not attempt.stopped]
        failures += [f"{kind} were not tried" for kind in untried]
        if not failures:
            acts = dict.fromkeys(attempt.act for _, attempt in attempts)
            lines[layer] = f"holds; tried and stopped: {', '.join(acts)}"
        elif layer in may_lack:
            lines[layer] = f"DOES NOT HOLD, and may be missing: {'; '.join(failures)}"
        else:
            raise NotContained(
                f"containment layer {layer!r} does not hold: {'; '.join(failures)}. To start without it, name it in "
                f"{option}"
            )
    return lines
