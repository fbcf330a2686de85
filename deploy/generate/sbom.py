"""Print what the host half's package contains, as CycloneDX 1.6: `python -m deploy.generate.sbom WHEELS VERSION`.

One component for each wheel (https://cyclonedx.org/docs/1.6/json/), with the hash of the file from the package index.
"""

import hashlib
import json
import os
import sys
import zipfile
from datetime import UTC, datetime
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

NAME = "unbounded-agent"


def sbom(wheels: Path, version: str, time: datetime) -> dict[str, Any]:
    """Return the document on the wheels in a directory. Raises ValueError for a wheel without metadata."""
    reference = f"{NAME}@{version}"
    components = [_component(wheel) for wheel in sorted(wheels.glob("*.whl"))]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": reference,
                "name": NAME,
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": f"pkg:deb/{NAME}@{version}",
            },
        },
        "components": components,
        "dependencies": [{"ref": reference, "dependsOn": [each["bom-ref"] for each in components]}],
    }


def _component(wheel: Path) -> dict[str, Any]:
    metadata = _metadata(wheel)
    purl = f"pkg:pypi/{metadata['Name'].lower().replace('_', '-')}@{metadata['Version']}?file_name={wheel.name}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": metadata["Name"],
        "version": metadata["Version"],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}],
        "licenses": [_license(metadata)],
        "purl": purl,
    }


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if len(names) != 1:
            raise ValueError(f"{wheel} has {len(names)} files METADATA instead of one")
        return HeaderParser().parsestr(archive.read(names[0]).decode())


def _license(metadata: Message) -> dict[str, Any]:
    """Return the license of a package's metadata: an SPDX expression (PEP 639), otherwise the older free text."""
    if "License-Expression" in metadata:
        return {"expression": metadata["License-Expression"]}
    return {"license": {"name": metadata["License"]}}


if __name__ == "__main__":
    built = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    sys.stdout.write(json.dumps(sbom(Path(sys.argv[1]), sys.argv[2], built), indent=2) + "\n")
