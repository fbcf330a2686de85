"""The messages of the kubelet's APIs, as the kubelet writes and reads them."""

from typing import Any

from agent.dra import kubelet_pb2

SAME = {"NodePrepareResourcesRequest": "ClaimsRequest", "NodeUnprepareResourcesRequest": "ClaimsRequest"}
"""Messages of the kubelet with the same fields, which have one name in kubelet.proto."""


def make(name: str, /, **fields: object) -> bytes:
    """Return the bytes of a message."""
    encoded: bytes = getattr(kubelet_pb2, SAME.get(name, name))(**fields).SerializeToString()
    return encoded


def read(name: str, data: bytes) -> Any:  # noqa: ANN401 (the library makes its classes at run time)
    """Return a message."""
    return getattr(kubelet_pb2, name).FromString(data)
