"""Is a process that an environment lives in, with the sessions that the server gives it.

The module is run as a zygote, which imports what every such process needs and forks them
(``fork_server``); the author's code is loaded behind the fork, so the zygote never runs it and has
one thread. A process has a control socket, on which the server opens and breaks off sessions, and a
channel for each session, on which one frame answers another.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from realhf.base.process import keep_this_process
from realhf.env.containment.fork_server import serve_forks
from realhf.env.containment.frames import frame, read_frame
from realhf.env.loader.load import build_environment
from realhf.env.server.spec.player import Host, SpecPlayer
from realhf.env.server.spec.slots import told
from realhf.env.server.wire import WireError

FIRST = "facts"
STUCK = "stuck"
OPEN = "open"
KILL = "kill"
RESET = "reset"
STEP = "step"
CLOSE = "close"
DATAGRAM = 64 * 1024
"""The longest message on the control socket."""
_TELL_S = 0.25


def run(request: dict[str, Any], fds: list[int]) -> None:
    """Load the environment, say what it is, and play sessions until the server closes the control
    socket. ``fds``: that socket, and a file for the stack of a crash."""
    for descriptor in fds:
        os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=fds[0])
    faulthandler.enable(fds[1], all_threads=False)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    keep_this_process()
    try:
        spec = build_environment(request["reference"], request["options"])
        host = Host(spec, request["size"], request["timeout_s"], info=request["info"])
    except (Exception, SystemExit) as error:
        text = str(error) if isinstance(error, ValueError) else told(error)
        control.send(json.dumps({"error": text[: DATAGRAM // 2]}).encode())
        return
    control.send(json.dumps({FIRST: asdict(host.facts)}).encode())
    _Sessions(control, host).serve()


class _Sessions:
    """Plays the sessions of this process, each in a thread of its own."""

    def __init__(self, control: socket.socket, host: Host) -> None:
        self._control = control
        self._host = host
        self._players: dict[int, SpecPlayer] = {}
        self._told = 0

    def serve(self) -> None:
        """Open sessions and break off calls until the server closes the control socket."""
        while True:
            self._tell_stuck()
            if not select.select([self._control], [], [], _TELL_S)[0]:
                continue
            data, fds, _, _ = socket.recv_fds(self._control, DATAGRAM, 1)
            if not data:
                return
            what, number = json.loads(data)
            if what == OPEN:
                os.set_inheritable(fds[0], False)
                channel = socket.socket(fileno=fds[0])
                threading.Thread(target=self._play, args=(channel, number), daemon=True).start()
            elif what == KILL and (player := self._players.get(number)) is not None:
                player.kill()

    def _play(self, channel: socket.socket, number: int) -> None:
        """Answer the frames of a session until its end."""
        with channel, channel.makefile("rb") as stream:
            place = self._host.places.acquire()
            player = self._players[number] = self._host.player(place)
            while (request := read_frame(stream)) is not None and request["what"] != CLOSE:
                answer = _answer(player, request)
                if "reply" not in answer:
                    self._tell_stuck()
                channel.sendall(frame(answer))
            del self._players[number]
            self._host.places.release(place)
            self._tell_stuck()
            if request is not None:
                channel.sendall(frame({}))

    def _tell_stuck(self) -> None:
        """Say how many threads are left behind, if that has changed; later, if the server has not
        read for long."""
        if (stuck := self._host.places.stuck) != self._told:
            with suppress(OSError):
                self._control.send(json.dumps({STUCK: stuck}).encode(), socket.MSG_DONTWAIT)
                self._told = stuck


def _answer(player: SpecPlayer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        reply = (
            player.reset(request["data"])
            if request["what"] == RESET
            else player.step(request["data"])
        )
        return {"reply": reply, "state": player.state()}
    except WireError as error:
        found = {
            "code": error.code,
            "message": error.message,
            "retryable": error.retryable,
            "kind": error.kind,
        }
        field = ".".join(error.errors[0]["loc"]) if error.errors else ""
        return {"error": found | {"field": field}, "state": player.state()}
    except Exception as error:
        logging.exception("a session failed")
        return {"failed": told(error), "state": player.state()}


def main() -> None:
    """Run the zygote on the control socket that the command line names."""
    serve_forks(socket.socket(fileno=int(sys.argv[1])), {}, run)


if __name__ == "__main__":
    main()
