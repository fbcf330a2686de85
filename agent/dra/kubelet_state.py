"""Reads the kubelet's own record of claims: the claims of its pods, and claims that it has not unprepared yet.

The format is internal to the kubelet (pkg/kubelet/cm/dra/state of k8s.io/kubernetes,
checkpoint.dra.kubelet.k8s.io/v1), so the record is used only where nothing else has the answer. The kubelet
writes the record before it prepares a claim, and again after it has unprepared the claim.
"""

from collections.abc import Iterator
from typing import Any

from agent.dra.messages import ClaimReference, PreparedDevice
from agent.model.errors import DocumentError
from agent.model.json_document import get, objects, parse_object, require_object, strings
from agent.model.paths import DRA_DRIVER
from agent.system.files import System

RECORD_NAME = "dra_manager_state"
"""Name of the file in the kubelet's root directory (draManagerStateFileName of pkg/kubelet/cm/dra/manager.go)."""
SIZE_LIMIT = 8 << 20
"""Bytes of the largest record that is read."""


def read_record(system: System, kubelet: str) -> bytes:
    """Return the record's content; empty if there is none, because the kubelet then has no claim. Raises OSError.

    `kubelet` is the kubelet's root directory.
    """
    try:
        return system.read(f"{kubelet}/{RECORD_NAME}", SIZE_LIMIT)
    except FileNotFoundError:
        return b""


def mentions(record: bytes, claim: ClaimReference) -> bool:
    """Return whether the kubelet's record has the claim.

    In a record of an unknown format, every occurrence of the uid counts, even where it is another claim's name.
    """
    try:
        return any(get(RECORD_NAME, each, "ClaimUID", str) == claim.uid for each in _items(record)) if record else False
    except DocumentError:
        return claim.uid.encode() in record


def prepared_claims(record: bytes) -> dict[ClaimReference, tuple[PreparedDevice, ...]]:
    """Return the prepared claims that have devices of this driver. Raises DocumentError."""
    return dict(_claims(record)) if record else {}


def _items(record: bytes) -> tuple[dict[str, Any], ...]:
    """Return the record's claims. Raises DocumentError."""
    # The record is a JSON object, and its key Data is a string that is itself JSON.
    where = RECORD_NAME
    data = parse_object(where, get(where, parse_object(where, record), "Data", str).encode(errors="replace"))
    # Go writes an empty list as null.
    if data.get("ClaimInfoStateList", ()) is None:
        return ()
    return objects(where, data, "ClaimInfoStateList", lambda _, item: item)


def _claims(record: bytes) -> Iterator[tuple[ClaimReference, tuple[PreparedDevice, ...]]]:
    where = RECORD_NAME
    for claim in _items(record):
        drivers = get(where, claim, "DriverState", dict)
        if DRA_DRIVER in drivers:
            driver = require_object(where, drivers[DRA_DRIVER])
            devices = objects(where, {"Devices": driver.get("Devices") or []}, "Devices", _device)
            if devices:
                keys = ("Namespace", "ClaimName", "ClaimUID")
                yield ClaimReference(*(get(where, claim, key, str) for key in keys)), devices


def _device(where: str, item: dict[str, Any]) -> PreparedDevice:
    # Go writes an empty list as null.
    present = {key: value for key, value in item.items() if value is not None}
    return PreparedDevice(
        strings(where, {"RequestNames": [], **present}, "RequestNames"),
        get(where, present, "PoolName", str),
        get(where, present, "DeviceName", str),
        strings(where, {"CDIDeviceIDs": [], **present}, "CDIDeviceIDs"),
        get(where, {"ShareID": "", **present}, "ShareID", str),
    )
