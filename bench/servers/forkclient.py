"""Replaces `python -m vllm.entrypoints.openai.api_server`: a fork server starts vLLM's server on its request.

    python forkclient.py SOCKET [argument of vLLM's server ...]

It starts for each server, so it imports few modules, all of the standard library. Standard input, output and error,
the environment and the working directory of the server are those of this process. SIGTERM, SIGINT and SIGHUP go on to
the server's process group; when this process is killed, the group is killed. This process ends when the last process
of the group has ended, with the server's exit status.
"""

import json
import os
import signal
import socket
import struct
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def request(arguments: list[str]) -> bytes:
    """The message to the fork server: the length of a JSON object in four bytes, and the object."""
    body = json.dumps({"arguments": arguments, "environ": dict(os.environ), "cwd": os.getcwd()}).encode()
    return struct.pack("!I", len(body)) + body


def main() -> int:
    path, *arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    data = request(arguments)
    sent = socket.send_fds(connection, [data], [0, 1, 2])
    connection.sendall(data[sent:])
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    reply = connection.recv(4)
    if len(reply) < 4:
        print("the fork server is gone, and its servers with it", file=sys.stderr)
        return 1
    (status,) = struct.unpack("!i", reply)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
