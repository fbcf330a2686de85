"""Keeps the record of prepared claims in a file.

The file is written before the kubelet gets the answer to its request. So if this process crashes, the next one still
knows every claim that the kubelet considers prepared.
"""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agent.dra.kubelet_state import prepared_claims, read_record
from agent.dra.messages import ClaimReference, PreparedDevice
from agent.model.digest import json_digest
from agent.model.errors import AgentError, DocumentError
from agent.model.json_document import accept_version, get, objects, parse_object, strings
from agent.model.paths import DRA_STATE
from agent.system.files import System

log = logging.getLogger(__name__)

CHECKPOINT = f"{DRA_STATE}/claims.json"
LOCK = f"{DRA_STATE}/lock"
VERSION = 1
SIZE_LIMIT = 4 << 20
"""Bytes of the largest record that is read. A claim takes about 500."""

Prepared = Mapping[ClaimReference, tuple[PreparedDevice, ...]]


class Checkpoint:
    """The file with the prepared claims. Only one process at a time can use it."""

    def __init__(self, system: System, kubelet: str) -> None:
        """`kubelet` is the kubelet's root directory. Raises AgentError, also if another process uses the file."""
        self._system, self._kubelet = system, kubelet
        self._durable = threading.Event()
        self._durable.set()
        try:
            system.make_directory(DRA_STATE)
            self._lock = system.open_lock(LOCK)
            # Two processes would not know each other's claims, and would replace each other's sockets.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise AgentError(
                f"{LOCK}: another process offers this node's GPUs",
                "stop that process: only unbounded-agent-dra.service may offer them",
            ) from error
        except OSError as error:
            raise AgentError(f"{LOCK}: {error.strerror}", "check that root can write there") from error

    def close(self) -> None:
        """Make the file durable, and release it for other processes."""
        self.sync()
        os.close(self._lock)

    def load(self) -> dict[ClaimReference, tuple[PreparedDevice, ...]]:
        """Return the prepared claims.

        If the file is missing or unusable, return the claims in the kubelet's own record. If that record is unusable
        too, return none.
        """
        try:
            return parse_checkpoint(self._system.read(CHECKPOINT, SIZE_LIMIT))
        except FileNotFoundError:
            why = "is missing"
        except (DocumentError, OSError) as error:
            why = f"is not usable: {error}"
        try:
            claims = prepared_claims(read_record(self._system, self._kubelet))
        except (DocumentError, OSError) as error:
            # It is safe to start without any claim: the scheduler does not allocate a device to two claims, and the
            # file CHECKPOINT is only a second guard against two claims with one device.
            log.warning(
                "%s %s, and the kubelet's record is not usable: %s; starting without prepared claims",
                CHECKPOINT,
                why,
                error,
            )
            return {}
        if claims:
            log.warning("%s %s: %s claims are taken from the kubelet's record", CHECKPOINT, why, len(claims))
        return claims

    def save(self, claims: Prepared) -> None:
        """Replace the file without waiting for the disk. Raises OSError.

        If this process crashes, the file has the new content. If the kernel crashes, the new content may be lost, but
        then no pod is left running. The next call of `sync` makes the file durable.
        """
        self._system.write_quickly(CHECKPOINT, render_checkpoint(claims), mode=0o600)
        self._durable.clear()

    def sync(self) -> None:
        """Make the file durable if it has changed. Must be called regularly. Errors are only logged."""
        if self._durable.is_set():
            return
        # The flag is set before the sync, because another thread may clear it during the sync, by `save`. If the sync
        # fails, the flag stays set: another fsync(2) of the same data could succeed without writing them, so a second
        # try would prove nothing. The next `save` writes a new file, and clears the flag.
        self._durable.set()
        try:
            self._system.sync(CHECKPOINT)
        except OSError as error:
            log.error(
                "cannot sync %s to disk: %s; if the host crashes before the next change is synced, the latest changes "
                "may be lost",
                CHECKPOINT,
                error.strerror,
            )


def render_checkpoint(claims: Prepared) -> bytes:
    """Return the content of the file."""
    items = [
        {**asdict(claim), "devices": [asdict(device) for device in devices]}
        for claim, devices in sorted(claims.items(), key=lambda item: item[0].uid)
    ]
    document = {"version": VERSION, "digest": json_digest(items), "claims": items}
    return json.dumps(document).encode() + b"\n"


def parse_checkpoint(data: bytes) -> dict[ClaimReference, tuple[PreparedDevice, ...]]:
    """Return the claims in a document. Raises DocumentError if it is damaged."""
    where = CHECKPOINT
    document = parse_object(where, data)
    accept_version(where, document, (VERSION,))
    if get(where, document, "digest", str) != json_digest(document.get("claims")):
        raise DocumentError(f"{where}: the digest does not match")
    return dict(objects(where, document, "claims", _claim))


def _claim(where: str, item: dict[str, Any]) -> tuple[ClaimReference, tuple[PreparedDevice, ...]]:
    reference = ClaimReference(*(get(where, item, key, str) for key in ("namespace", "name", "uid")))
    return reference, objects(where, item, "devices", _device)


def _device(where: str, item: dict[str, Any]) -> PreparedDevice:
    return PreparedDevice(
        strings(where, item, "requests"),
        get(where, item, "pool", str),
        get(where, item, "device", str),
        strings(where, item, "cdi_names"),
        get(where, item, "share", str),
        get(where, item, "admin", bool),
    )
