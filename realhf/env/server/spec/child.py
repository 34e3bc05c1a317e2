"""Process in which an environment runs, and in which it plays the sessions that the server assigns
to it.

This module is run as a zygote, which imports what all such processes need and forks them
(``fork_server``). The author's code is loaded after the fork, so that the zygote never runs it and
keeps a single thread. Each process has a control socket, over which the server opens sessions and
cancels calls, and one channel per session, on which every request frame gets one answer frame.
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

from realhf.base.process import block_exit_in_threads
from realhf.env.containment.fork_server import serve_forks
from realhf.env.containment.frames import encode_frame, read_frame
from realhf.env.loader.load import build_environment
from realhf.env.server.spec.player import EnvironmentHost, SpecPlayer
from realhf.env.server.spec.slots import describe_error
from realhf.env.server.wire import WireError

FIRST = "facts"
"""Key of the first message on the control socket, which describes the environment."""
STUCK = "stuck"
"""Key of a message on the control socket that holds the number of abandoned threads."""
OPEN = "open"
"""Message from the server on the control socket: open a session, whose channel is sent along."""
KILL = "kill"
"""Message from the server on the control socket: cancel a session's call."""
RESET = "reset"
"""Request in a session: start an episode."""
STEP = "step"
"""Request in a session: take a turn."""
CLOSE = "close"
"""Request in a session: end it."""
DATAGRAM = 64 * 1024
"""Maximum bytes of a message on the control socket."""
_REPORT_S = 0.25
"""Seconds between two checks of the number of abandoned threads."""


def run(request: dict[str, Any], fds: list[int]) -> None:
    """Load the environment, send its description, and play sessions until the server closes the
    control socket.

    fds: the control socket, and a file for the stack trace of a crash. If the environment cannot be
    loaded, {"error": text} is sent to the server.
    """
    for descriptor in fds:
        os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=fds[0])
    faulthandler.enable(fds[1], all_threads=False)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    block_exit_in_threads()
    try:
        spec = build_environment(request["reference"], request["options"])
        host = EnvironmentHost(spec, request["size"], request["timeout_s"], info=request["info"])
    except (Exception, SystemExit) as error:
        text = str(error) if isinstance(error, ValueError) else describe_error(error)
        control.send(json.dumps({"error": text[: DATAGRAM // 2]}).encode())
        return
    control.send(json.dumps({FIRST: asdict(host.facts)}).encode())
    _Sessions(control, host).serve()


class _Sessions:
    """The sessions of this process, each played in its own thread."""

    def __init__(self, control: socket.socket, host: EnvironmentHost) -> None:
        self._control = control
        self._host = host
        self._players: dict[int, SpecPlayer] = {}
        self._reported_stuck = 0

    def serve(self) -> None:
        """Open sessions and cancel calls until the server closes the control socket."""
        while True:
            self._report_stuck()
            if not select.select([self._control], [], [], _REPORT_S)[0]:
                continue
            data, fds, _, _ = socket.recv_fds(self._control, DATAGRAM, 1)
            if not data:
                return
            action, number = json.loads(data)
            if action == OPEN:
                os.set_inheritable(fds[0], False)
                channel = socket.socket(fileno=fds[0])
                threading.Thread(target=self._play, args=(channel, number), daemon=True).start()
            elif action == KILL and (player := self._players.get(number)) is not None:
                player.kill()

    def _play(self, channel: socket.socket, number: int) -> None:
        """Answer the request frames of a session until it ends."""
        with channel, channel.makefile("rb") as stream:
            env_thread = self._host.env_threads.acquire()
            player = self._players[number] = self._host.make_player(env_thread)
            while (request := read_frame(stream)) is not None and request["what"] != CLOSE:
                answer = _answer(player, request)
                if "reply" not in answer:
                    self._report_stuck()
                channel.sendall(encode_frame(answer))
            del self._players[number]
            self._host.env_threads.release(env_thread)
            self._report_stuck()
            if request is not None:
                channel.sendall(encode_frame({}))

    def _report_stuck(self) -> None:
        """Send the number of abandoned threads if it has changed. If the control socket is full
        because the server has not read it, try again later."""
        if (stuck := self._host.env_threads.stuck) != self._reported_stuck:
            with suppress(OSError):
                self._control.send(json.dumps({STUCK: stuck}).encode(), socket.MSG_DONTWAIT)
                self._reported_stuck = stuck


def _answer(player: SpecPlayer, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer frame for a request: a reply, a wire error, or an unexpected failure,
    always with the state of the session."""
    try:
        reply = (
            player.reset(request["data"])
            if request["what"] == RESET
            else player.step(request["data"])
        )
        return {"reply": reply, "state": player.state()}
    except WireError as error:
        error_data = {
            "code": error.code,
            "message": error.message,
            "retryable": error.retryable,
            "kind": error.kind,
        }
        field = ".".join(error.errors[0]["loc"]) if error.errors else ""
        return {"error": error_data | {"field": field}, "state": player.state()}
    except Exception as error:
        logging.exception("a session failed")
        return {"failed": describe_error(error), "state": player.state()}


def main() -> None:
    """Run the zygote on the control socket, whose descriptor is the first command-line argument."""
    serve_forks(socket.socket(fileno=int(sys.argv[1])), {}, run)


if __name__ == "__main__":
    main()
