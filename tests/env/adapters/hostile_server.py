"""A program that speaks MCP by hand, and breaks it as its first argument says."""

from __future__ import annotations

import json
import sys
import time

MODE = sys.argv[1]
CODES = {"wrong": -32602, "internal": -32603, "unknown": -32601}
SCHEMA = {"type": "object", "properties": {}}
TOOLS = {
    "no object": [{"name": "a", "inputSchema": {"type": "string"}}],
    "no schema": [{"name": "a"}],
    "twice": [{"name": "a", "inputSchema": SCHEMA}] * 2,
    "no name": [{"name": "", "inputSchema": SCHEMA}],
    "none": [],
    "many": [{"name": f"t{number}", "inputSchema": SCHEMA} for number in range(300)],
}


def send(message: object) -> None:
    print(json.dumps(message), flush=True)


def answer(request: dict) -> object:
    if request["method"] == "initialize":
        version = request["params"]["protocolVersion"]
        info = {"name": "hostile", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if request["method"] == "tools/list":
        if MODE == "endless":
            return {"tools": [], "nextCursor": "more"}
        return {"tools": TOOLS.get(MODE, [{"name": "a", "inputSchema": SCHEMA}])}
    if MODE == "no result":
        return {"content": "text"}
    return {"content": [{"type": "text", "text": "done"}]}


if MODE == "exits":
    print("no licence", file=sys.stderr)
    sys.exit(3)
if MODE == "silent":
    time.sleep(600)
if MODE == "babbles":
    while True:
        print("starting up ...", flush=True)
if MODE == "one line":
    while True:
        sys.stdout.write("x" * (1 << 20))
if MODE == "greets":
    print("Server v1.0\nready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    if request["method"] not in ("initialize", "tools/list", "tools/call"):
        error = {"code": -32601, "message": "Method not found"}
        send({"jsonrpc": "2.0", "id": request["id"], "error": error})
        continue
    if MODE == "refuses" and request["method"] == "tools/list":
        error = {"code": -32602, "message": "no list today"}
        send({"jsonrpc": "2.0", "id": request["id"], "error": error})
        continue
    if request["method"] == "tools/call":
        if MODE == "notifies":
            text = "x" * 100_000
            while True:
                data = {"level": "info", "data": text}
                send({"jsonrpc": "2.0", "method": "notifications/message", "params": data})
        if MODE in CODES:
            error = {"code": CODES[MODE], "message": "cannot do that"}
            send({"jsonrpc": "2.0", "id": request["id"], "error": error})
            continue
    send({"jsonrpc": "2.0", "id": request["id"], "result": answer(request)})
