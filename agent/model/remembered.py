"""The record of the GPUs that machines were last granted. GPUs in it that are no longer on the PCI bus are lost.

Because this record is the only evidence of a lost GPU, there are two synced copies of it, each with a digest. A good
copy replaces a damaged one. If both are damaged, a condition reports the damage until an administrator acknowledges it,
as for a lost GPU.
"""

import json
from typing import Annotated, Any

from msgspec import Meta, Struct, to_builtins

from agent.model.digest import sha256
from agent.model.errors import DocumentError
from agent.model.json_document import accept_version, get
from agent.model.typed_json import convert, decode

VERSION = 1


class RememberedGpu(Struct, frozen=True, order=True):
    """One GPU that machines were granted."""

    pci_address: str
    vendor: str
    model: str = ""
    uuid: str = ""
    """Empty if the UUID was never known. The agent cannot recognise such a GPU in another slot."""
    machines: tuple[str, ...] = ()
    """Machines that have the GPU, or had it when it disappeared."""
    lost: Annotated[float, Meta(ge=0, lt=1 << 36)] = 0.0
    """When the GPU was first missing, in seconds since the epoch; 0 while it is present."""

    def describe(self) -> str:
        names = " ".join(name for name in (self.model, self.uuid) if name)
        return f"{self.pci_address} ({names or self.vendor})"


class Remembered(Struct, frozen=True):
    """The whole record."""

    gpus: tuple[RememberedGpu, ...] = ()
    damage: str = ""
    """Why an earlier record could not be read; empty if there is no such damage. GPUs that were lost before the damage
    are unknown."""


def render_remembered(remembered: Remembered) -> bytes:
    """Return the record as JSON."""
    content = to_builtins(remembered)
    document = {"version": VERSION, "digest": _digest(content), **content}
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_remembered(where: str, data: bytes) -> Remembered:
    """Return the record in a document. Raises DocumentError, which names the key."""
    document = decode(where, data, dict[str, Any])
    accept_version(where, document, VERSION)
    remembered = convert(where, document, Remembered)
    if get(where, document, "digest", str) != _digest({key: document.get(key) for key in ("gpus", "damage")}):
        raise DocumentError(f"{where}: the content does not match its digest")
    return remembered


def _digest(content: object) -> str:
    """Return a digest of the record. Without it, damage to an address would look like a lost GPU."""
    return sha256(json.dumps(content).encode())
