"""Names of the devices in others' CDI specifications. Pure."""

import json

from agent.model.errors import DocumentError


def device_names(text: str) -> tuple[str, ...]:
    """Return qualified names; none for an invalid specification. Raises DocumentError if that is unknown."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = _of_yaml(text)
    kind, devices = (document.get("kind"), document.get("devices")) if isinstance(document, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(devices, list):
        return ()
    names = (each.get("name") if isinstance(each, dict) else None for each in devices)
    return tuple(f"{kind}={name}" for name in names if isinstance(name, str))


def _of_yaml(text: str) -> object:
    # Imported here: few machines have other specifications in YAML, and PyYAML takes a third of the time that loading
    # all the rest takes.
    try:
        from agent.vendors.cdi.yaml_names import parse
    except ImportError as error:
        raise DocumentError(
            f"not JSON, and PyYAML cannot be loaded: {error}", "install python3-yaml in this machine's image"
        ) from error
    return parse(text)
