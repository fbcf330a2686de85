"""A gRPC server as a process, for tests that measure its memory. Run with the path of its socket.

Its parent is the kubelet, and ends it by closing its standard input.
"""

import os
import sys

from agent.dra.grpc_server import Limits, ListeningSocket, Method, Server
from agent.dra.kubelet import KubeletPeer

ECHO, BIG, SMALL = "/test.Example/Echo", "/test.Example/Big", "/test.Example/Small"
SIZE = 1 << 20
"""Bytes of a response of BIG, and of the longest requests."""

if __name__ == "__main__":
    kubelet = KubeletPeer()
    kubelet.follow(os.getppid())
    methods: dict[str, Method] = {ECHO: bytes, BIG: lambda _: bytes(SIZE), SMALL: lambda _: b"x"}
    server = Server(ListeningSocket(*os.path.split(sys.argv[1])), methods, kubelet.refusal, Limits())
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(0.1)
