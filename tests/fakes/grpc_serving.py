"""Serves gRPC for this process, which takes the place of the kubelet."""

import os
from collections.abc import Mapping

from agent.dra.grpc_server import Limits, Server
from agent.dra.grpc_wire import Method
from agent.dra.kubelet_peer import KubeletPeer
from agent.dra.unix_socket import ListeningSocket


def this_process() -> KubeletPeer:
    """Return a kubelet that is this process."""
    peer = KubeletPeer()
    peer.follow(os.getpid())
    return peer


THIS_PROCESS = this_process()
DEFAULT = Limits()


def serve(path: str, methods: Mapping[str, Method], limits: Limits = DEFAULT) -> Server:
    """Serve methods at a path."""
    return Server(ListeningSocket(*os.path.split(path)), methods, THIS_PROCESS.refusal, limits)
