"""An MCP server written with the official SDK, for the tests: accounts, kept in its working
folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]
from mcp.server.mcpserver.exceptions import ToolError  # pyright: ignore[reportMissingImports]

BOOK = Path("book.json")
server = MCPServer("ledger")


def read_book() -> dict[str, int]:
    return json.loads(BOOK.read_text()) if BOOK.exists() else {}


@server.tool()
def deposit(account: str, amount: int) -> str:
    """Add to an account."""
    if amount <= 0:
        raise ToolError("amounts are positive")
    book = read_book()
    book[account] = book.get(account, 0) + amount
    BOOK.write_text(json.dumps(book))
    return f"{account} holds {book[account]}"


@server.tool()
def balance(account: str) -> int:
    """What an account holds."""
    return read_book().get(account, 0)


@server.tool()
def misbehave(how: str) -> str:
    """Fail as a server can."""
    if how == "die":
        os._exit(7)
    if how == "hang":
        time.sleep(600)
    if how == "fill":
        return "x" * (64 << 20)
    if how == "long":
        return "x" * (3 << 20)
    if how == "eat":
        return str(len(bytearray(8 << 30)))
    if how == "fork":
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        return str(os.getpid())
    if how == "read":
        return Path(sys.argv[1]).read_text()
    if how == "connect":
        import socket

        socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=2).close()
        return "connected"
    if how == "secrets":
        return json.dumps(dict(os.environ))
    return "fine"


if __name__ == "__main__":
    server.run("stdio")
