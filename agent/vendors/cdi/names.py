"""Lists the devices in CDI specifications that other programs wrote. Pure."""

import json
from typing import Any

from agent.model.errors import DocumentError

LONGEST_KIND = 256
"""Characters of the longest kind that is accepted. Real ones have some twenty."""


def device_names(text: str) -> tuple[str, ...]:
    """Return the qualified names of a specification's devices; none if it has no kind or no list of devices.

    Raises DocumentError if the text is neither JSON nor plain YAML, if two keys differ only in case, or if the text is
    YAML and PyYAML is missing.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = _parse_yaml(text)
    kind, devices = (_member(document, key) for key in ("kind", "devices"))
    if not isinstance(kind, str) or not isinstance(devices, list):
        return ()
    # Each device's qualified name begins with the kind: a long one would take its length times the number of devices.
    if len(kind) > LONGEST_KIND:
        raise DocumentError(f"its kind has more than {LONGEST_KIND} characters", "shorten it, or remove the file")
    names = (_member(each, "name") for each in devices)
    return tuple(
        f"{kind}={name if isinstance(name, str) else json.dumps(name)}" for name in names if isinstance(name, str | int)
    )


def _parse_yaml(text: str) -> object:
    # Imported here, because few machines have other specifications in YAML, and importing PyYAML takes a third of the
    # time of all other imports.
    try:
        from agent.vendors.cdi.yaml_names import parse
    except ImportError as error:
        raise DocumentError(
            f"not JSON, and PyYAML cannot be loaded: {error}", "install python3-yaml in this machine's image"
        ) from error
    return parse(text)


def _member(document: Any, key: str) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return a member; None if it is missing. The key's case is ignored, because Go's decoder in runtimes ignores it.

    Raises DocumentError if two keys differ only in case: which of them counts depends on the parser.
    """
    if not isinstance(document, dict):
        return None
    found = [each for each in document if each.casefold() == key]
    if len(found) > 1:
        raise DocumentError(f"the keys {found[0]!a} and {found[1]!a} differ only in case", "remove one, or the file")
    return document[found[0]] if found else None
