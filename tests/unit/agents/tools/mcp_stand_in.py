"""An MCP server that speaks the protocol by hand, so that it starts in milliseconds; `die` ends it."""

import json
import os
import sys

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS = [
    {"name": "double", "description": "Twice a number.", "inputSchema": SCHEMA},
    {"name": "count", "description": "How many calls there were.", "inputSchema": NOTHING},
    {"name": "whoami", "description": "The process and its key.", "inputSchema": NOTHING},
    {"name": "fail", "description": "Fails.", "inputSchema": NOTHING},
    {"name": "die", "description": "Ends the server.", "inputSchema": NOTHING},
]
count = 0


def call(name, arguments):
    global count
    count += 1
    if name == "die":
        os._exit(3)
    if name == "fail":
        return {"content": [{"type": "text", "text": "no such item"}], "isError": True}
    text = {
        "double": str(2 * arguments.get("a", 0)),
        "count": str(count),
        "whoami": f"{os.getpid()} {os.environ.get('A_SECRET_KEY')} {os.environ.get('GIVEN')}",
    }[name]
    return {"content": [{"type": "text", "text": text}], "isError": False}


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        result = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "hand-made", "version": "1"},
        }
    elif method == "tools/list":
        first = not params.get("cursor")
        result = {"tools": TOOLS[:3], "nextCursor": "more"} if first else {"tools": TOOLS[3:]}
    elif method == "tools/call":
        result = call(params["name"], params.get("arguments") or {})
    else:
        error = {"code": -32601, "message": "unknown method"}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
