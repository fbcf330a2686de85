"""Leaves out of a CDI specification what a later nvidia-ctk may write, and is unknown but not dangerous. Pure.

What is dangerous stays, so that `verify` refuses the specification and names it. What is left depends on the part:

- An unknown key of the specification, of a device, a node, a mount or a hook is left out, and the rest stays: the rest
  alone gives a container no more than was granted, even if the key would have restricted it; and without the node, the
  mount or the hook, a container could not use its GPU. Besides, runtimes refuse a specification with a key that they do
  not know. Of a mount's options, and of the flags and variables of a hook that containers need, only the unknown ones
  are left out, for the same reasons.
- Any other unknown part is left out as a whole: a mount, a hook, a variable, a device under a new kind of name.

`verify` then finds out whether something needed is missing.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from agent.model.errors import DocumentError
from agent.vendors.cdi.document import DEVICE_KEYS, items, object_of, objects, strings
from agent.vendors.nvidia.cdi.command import NVIDIA_CTK
from agent.vendors.nvidia.cdi.verify import DOCUMENT_KEYS
from agent.vendors.nvidia.cdi.verify_edits import (
    BIND_TYPES,
    HOOK_KEYS,
    MOUNT_KEYS,
    NODE_KEYS,
    Expectations,
    Fault,
    edit_faults,
    edits_problems,
    flag_faults,
    flags,
    hook_faults,
    hook_variable_faults,
    is_harmless,
    is_needed,
    mount_faults,
    node_faults,
    option_faults,
    variable_faults,
)

Part = TypeVar("Part")


class Kept(NamedTuple):
    """What is left of a specification."""

    spec: object
    left_out: tuple[str, ...] = ()
    """What was left out, in words."""
    harmless: tuple[str, ...] = ()
    """What is new and stays because it is harmless, in words."""


def without_unknown(spec: object, expected: Expectations, is_device: Callable[[str], bool] = lambda name: True) -> Kept:
    """Return the specification without its unknown parts. If it is malformed, it is returned as it is.

    `is_device` says whether a device's name is of a known kind.
    """
    sieve = _Sieve(expected)
    try:
        return Kept(sieve.document(object_of(spec, "the specification"), is_device), *sieve.in_words())
    except DocumentError:
        # `verify` reports it.
        return Kept(spec)


def remark_on(harmless: Iterable[str]) -> str:
    """Return the remark on what is new and stays."""
    return f"{NVIDIA_CTK} adds what this agent knows to be harmless: {', '.join(harmless)}"


class _Sieve:
    """Leaves out unknown parts, and takes down which. The same part in several devices is named once."""

    def __init__(self, expected: Expectations) -> None:
        self._expected = expected
        self._left_out: dict[str, None] = {}
        self._harmless: dict[str, None] = {}

    def in_words(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self._left_out), tuple(self._harmless)

    def document(self, document: dict[str, Any], is_device: Callable[[str], bool]) -> dict[str, Any]:
        kept = self._known(document, DOCUMENT_KEYS, "the specification")
        if "containerEdits" in kept:
            kept["containerEdits"] = self._edits(object_of(kept["containerEdits"], "containerEdits"))
        listed = [self._device(each) for each in objects(kept, "devices")]
        kept["devices"] = self._sifted(listed, lambda device: self._name_faults(device, is_device))
        return kept

    def _device(self, device: dict[str, Any]) -> dict[str, Any]:
        kept = self._known(device, DEVICE_KEYS, "a device")
        if not isinstance(kept.get("name"), str):
            raise DocumentError("a device has no name")
        return kept | {"containerEdits": self._edits(object_of(kept.get("containerEdits"), "containerEdits"))}

    def _name_faults(self, device: dict[str, Any], is_device: Callable[[str], bool]) -> Iterable[Fault]:
        name, edits = device["name"], device["containerEdits"]
        # What is still wrong with the edits is dangerous: then the device stays, so that `verify` names it.
        dangerous = any(True for _ in edits_problems(name, edits, self._expected))
        return () if is_device(name) else (Fault(f"device {name}", dangerous),)

    def _edits(self, edits: dict[str, Any]) -> dict[str, Any]:
        expected, nodes = self._expected, strings(edits, "deviceNodes", "path")
        kept = {key: edits[key] for key in self._sifted(edits, edit_faults)}
        changed: dict[str, list[Any]] = {
            "deviceNodes": self._sifted(
                (
                    self._known(each, NODE_KEYS, f"device node {each.get('path')}")
                    for each in objects(kept, "deviceNodes")
                ),
                lambda node: node_faults(node, expected),
            ),
            "mounts": self._sifted(
                (self._mount(each) for each in objects(kept, "mounts")),
                lambda mount: mount_faults(mount, nodes, expected),
            ),
            "hooks": self._sifted(
                (self._hook(each, nodes) for each in objects(kept, "hooks")),
                lambda hook: hook_faults(hook, nodes, expected),
            ),
            "env": self._sifted(items(kept, "env"), lambda setting: variable_faults(setting, expected)),
        }
        mounted = sorted(strings(changed, "mounts", "hostPath"))
        self._harmless |= dict.fromkeys(f"mount of {path}" for path in mounted if expected.is_harmless_node(path))
        self._harmless |= dict.fromkeys(f"{each}" for each in changed["env"] if is_harmless(each, expected))
        return kept | {key: value for key, value in changed.items() if key in kept}

    def _mount(self, mount: dict[str, Any]) -> dict[str, Any]:
        what = f"mount of {mount.get('hostPath')}"
        kept = mount if mount.get("type") not in BIND_TYPES else {key: mount[key] for key in mount if key != "type"}
        kept = self._known(kept, MOUNT_KEYS | {"type"}, what)
        if "options" in kept:
            kept["options"] = self._sifted(items(kept, "options"), lambda option: option_faults(what, option))
        return kept

    def _hook(self, hook: dict[str, Any], nodes: set[str]) -> dict[str, Any]:
        """Return the hook without its unknown parts, if containers need it; otherwise, return it as it is."""
        expected, kind = self._expected, is_needed(hook, self._expected)
        if not kind:
            return hook
        kept = self._known(hook, HOOK_KEYS, f"hook {kind}")
        if "env" in kept:
            kept["env"] = self._sifted(items(kept, "env"), lambda setting: hook_variable_faults(kind, setting))
        if kind not in expected.hooks:
            name, rest = items(kept, "args")[:2], items(kept, "args")[2:]
            sifted = self._sifted(flags(rest), lambda flag: flag_faults(kind, flag, nodes, expected))
            kept["args"] = [*name, *(each for flag in sifted for each in flag)]
        return kept

    def _known(self, part: dict[str, Any], keys: frozenset[str], what: str) -> dict[str, Any]:
        """Return the object without unknown keys. `what` names it."""
        return {
            key: part[key]
            for key in self._sifted(part, lambda key: () if key in keys else (Fault(f"key {key} of {what}", False),))
        }

    def _sifted(self, parts: Iterable[Part], faults: Callable[[Part], Iterable[Fault]]) -> list[Part]:
        """Return the parts that have no fault, or a dangerous one."""
        kept = []
        for part in parts:
            found = list(faults(part))
            if found and not any(each.dangerous for each in found):
                self._left_out |= dict.fromkeys(each.text for each in found)
            else:
                kept.append(part)
        return kept
