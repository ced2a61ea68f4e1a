"""Runs untrusted code for `child_process.py`: calls functions of the file that its argument names, which is ours.

Requests come on stdin as lines with a number, the name of a function and its arguments as a Python literal; replies go
to stdout as JSON lines. Whatever a request makes this process do, it can be killed, and nothing that it sends back is
executed. Imports nothing of Palestra.
"""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any


def reason(error: BaseException) -> str:
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return f"{type(error).__name__}: {error}"


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints is no reply
    requests, sys.stdin = sys.stdin.buffer, None
    functions: dict[str, Any] = {"__name__": "functions"}
    exec(compile(Path(sys.argv.pop()).read_text(encoding="utf-8"), "functions", "exec"), functions)
    for line in requests:
        number, function, arguments = line.decode().split(" ", 2)
        try:
            reply = {"number": int(number), "value": functions[function](**ast.literal_eval(arguments))}
        except BaseException as error:  # the code may ask to exit
            reply = {"number": int(number), "error": reason(error)[:2000]}
        replies.write(json.dumps(reply, default=str) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
