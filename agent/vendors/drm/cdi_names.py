"""Names of the devices of other CDI specs, without a parser of YAML, which the standard library lacks. Pure."""

import json
import re
from typing import Any

KIND = re.compile(r'^kind:\s*"?([^"\s#]+)"?\s*$', re.MULTILINE)
DEVICES = re.compile(r"^devices:\s*\n((?:(?: |- ).*\n?)*)", re.MULTILINE)
NAME = r'^{indentation}(?:- |  )name:\s*"?([^"\s#]+)"?\s*$'
"""By its indentation: other names stand deeper."""


def device_names(text: str) -> tuple[str, ...]:
    """Qualified names; none of what is no valid spec.

    Of YAML the block style is understood, which all known generators write.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        kind, devices = KIND.search(text), DEVICES.search(text)
        if not kind or not devices:
            return ()
        indentation = devices[1][: len(devices[1]) - len(devices[1].lstrip(" "))]
        names = re.findall(NAME.format(indentation=indentation), devices[1], re.MULTILINE)
        return tuple(f"{kind[1]}={name}" for name in names)
    return tuple(_listed(document))


def _listed(document: Any) -> list[str]:  # noqa: ANN401 - whatever JSON holds
    kind, devices = (document.get("kind"), document.get("devices")) if isinstance(document, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(devices, list):
        return []
    names = (each.get("name") if isinstance(each, dict) else None for each in devices)
    return [f"{kind}={name}" for name in names if isinstance(name, str)]
