"""Configures containerd, and reads back the resulting configuration."""

import json
from collections.abc import Mapping
from typing import Any

from agent.machine.containerd import files, tables
from agent.machine.containerd.active import change_was_interrupted
from agent.machine.containerd.change import DropInPaths, PlannedChange, digest, write_and_read_back
from agent.machine.containerd.effective import effective_is_noted, note_effective, noted_address
from agent.machine.containerd.formats import MAIN, Configuration, new_version
from agent.machine.containerd.imports import loaded_files, new_import
from agent.machine.containerd.nested import Table
from agent.machine.context import Context
from agent.machine.repairs import record_repair
from agent.machine.vendors import VENDOR_NAMES, machine_vendor
from agent.model.conditions import Condition, ConditionType, false, not_applicable, true
from agent.model.digest import sha256
from agent.model.errors import AgentError, DocumentError, ExitCodeError
from agent.model.handoff import Repair, Request
from agent.model.paths import MACHINE_STATE
from agent.model.reasons import Reason
from agent.system.files import System
from agent.vendors.machine_vendor import MachineVendor, RuntimeHandler

CONFIGURED = ConditionType.RUNTIME_CONFIGURED
BASELINE = f"{MACHINE_STATE}/containerd-baseline.toml"
OTHER_RUNTIMES = (
    "/run/k3s/containerd/containerd.sock",  # Also RKE2's.
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",  # Also MicroShift's.
    "/run/cri-dockerd.sock",
)
"""Sockets of runtimes that the agent does not configure. Other sockets may be those of a proxy before containerd."""
CDI_ENABLED = true(
    CONFIGURED, Reason.READ_BACK, "`containerd config dump` shows CDI enabled; these GPUs need nothing else"
)


def configure_runtime(context: Context, vendor: MachineVendor, request: Request) -> Condition:
    """Configure containerd for a request, and return RuntimeConfigured."""
    if not request.gpus:
        # The configuration stays: removing it would restart containerd now, and again when GPUs come back.
        return not_applicable(CONFIGURED, "no GPU is granted to this machine")
    others = (machine_vendor(each.vendor) for each in context.handoff.requests if each.gpus)
    if vendor.handler is None and any(each and each.handler for each in others):
        return not_applicable(CONFIGURED, "the drop-in for another vendor's runtime also enables CDI")
    return configure_vendor(context, vendor)


def configure_vendor(context: Context, vendor: MachineVendor) -> Condition:
    """Configure containerd for a vendor's runtime, and return RuntimeConfigured.

    If the vendor has no runtime, containerd is configured for CDI alone.

    Raises AgentError or OSError.
    """
    system, notes = context.system, context.notes
    handler, paths = vendor.handler, _drop_in_paths(context, vendor)
    drop_in, name = paths.drop_in, _note(vendor)
    program = system.find_program("containerd")
    if other := _other_runtime(context, program):
        hint = "which the agent does not configure: make the node with `unbounded-agent up` or kubeadm"
        return false(CONFIGURED, Reason.UNSUPPORTED_DISTRIBUTION, f"{other}, {hint}")
    if program is None:
        return false(CONFIGURED, Reason.NO_CONTAINERD, "containerd is not installed: install it in the image")
    if handler and not system.exists(handler.binary):
        return false(CONFIGURED, Reason.NO_HANDLER, f"{handler.binary} is not installed: install it in the image")
    if not context.owned.make_way(drop_in):
        return false(
            CONFIGURED,
            Reason.FOREIGN_FILE,
            f"{drop_in} exists and was not written by the agent, so it was left unchanged: move it away",
        )
    if handler:
        _edit_runtime_config(context, vendor)
    noted = notes.load(name)
    # If nothing that the result depends on has changed, no program is started.
    state = _inputs_digest(context, program, vendor, drop_in)
    known = noted.get("problem") or effective_is_noted(notes)
    if noted.get("state") == state and not change_was_interrupted(notes) and known:
        return CDI_ENABLED if noted.get("by_others") else _condition(str(noted.get("problem", "")), drop_in)
    # Imported here: most runs do not need containerd's version.
    from agent.machine.containerd.version import containerd_version

    if handler is None and not paths.former and _enabled_without_drop_in(context, drop_in, program):
        notes.save(name, {"state": state, "by_others": True})
        return CDI_ENABLED
    version = containerd_version(context, program)
    before = {path: files.read_optional(system, path) for path in (MAIN, drop_in, *paths.former)}
    planned = _planned_change(context, version, vendor, paths, before)
    faults, inputs = write_and_read_back(
        context, vendor, paths, planned, before, lambda: _inputs_digest(context, program, vendor, drop_in)
    )
    if not faults and (problem := _changed_by_others(noted, digest(before[drop_in]), planned, drop_in)):
        record_repair(notes, Repair.CONTAINERD, problem)
    # After a fault, `write_and_read_back` has restored or emptied the drop-in, so its content must be read again.
    content = files.read_optional(system, drop_in) if faults else planned.drop_in or before[drop_in]
    result = {"state": state if faults else inputs, "problem": faults, "drop_in": digest(content), "path": drop_in}
    notes.save(name, result if faults else {**result, "import": planned.pattern})
    return _condition(faults, drop_in)


def _other_runtime(context: Context, program: str | None) -> str:
    """Return which program has another runtime than this containerd; empty if none has, or if none is known."""
    system, own = context.system, noted_address(context.notes)
    sockets = [path for path in OTHER_RUNTIMES if path != own and system.exists(path)]
    if program and not sockets:
        return ""
    # Imported here: few machines have another runtime.
    from agent.system.kubelet_identity import other_runtime, program_with_kubelet

    return other_runtime(system, sockets) or ("" if program else program_with_kubelet(system))


def _note(vendor: MachineVendor) -> str:
    """Return the name of the note about a vendor's part of the configuration. Vendors without a runtime share one."""
    return f"containerd-{vendor.name if vendor.handler else 'cdi'}"


def _drop_in_paths(context: Context, vendor: MachineVendor) -> DropInPaths:
    """Return the path of the drop-in, and the former paths where it must be removed.

    If only CDI is needed, the drop-ins for vendors' runtimes stay, because their removal would restart containerd.
    """
    drop_in = context.handoff.containerd_drop_in or tables.drop_in_path(vendor.handler)
    kept = {drop_in} if vendor.handler else {drop_in, *_vendor_drop_ins()}
    own = (path for path in context.owned.paths if path.endswith(tables.SUFFIXES))
    return DropInPaths(drop_in, tuple(path for path in own if path not in kept))


def _vendor_drop_ins() -> list[str]:
    """Return the default paths of the drop-ins for vendors' runtimes."""
    return [tables.drop_in_path(handler) for handler in _handlers()]


def _names_a_runtime(system: System, drop_in: str) -> bool:
    """Return whether the drop-in is for a vendor's runtime, judged by its content: its path may be a configured one."""
    content = files.read_optional(system, drop_in) or b""
    return any(handler.binary.encode() in content for handler in _handlers())


def _handlers() -> list[RuntimeHandler]:
    vendors = (machine_vendor(name) for name in VENDOR_NAMES)
    return [vendor.handler for vendor in vendors if vendor and vendor.handler]


def _enabled_without_drop_in(context: Context, drop_in: str, program: str) -> bool:
    """Return whether CDI is enabled even without the agent's drop-in for CDI alone.

    Return False without a check if there is a drop-in for CDI alone, and none for a vendor's runtime: the existing
    drop-in is taken to be needed. Also return False if there is no main file. Otherwise, check containerd's effective
    configuration. The agent's drop-in for a vendor's runtime may enable CDI there, because that drop-in stays when the
    vendor's last GPU is withdrawn. containerd loads that drop-in after the one for CDI alone, so containerd 1.x ignores
    the table in the one for CDI alone.
    """
    system = context.system
    for_vendor = any(context.owned.has(path) for path in _vendor_drop_ins()) or _names_a_runtime(system, drop_in)
    if not system.exists(MAIN) or (system.exists(drop_in) and not for_vendor):
        return False
    from agent.machine.containerd.version import known_version

    try:
        version = known_version(context, program)
        effective = files.effective_config(system, MAIN, version)
        note_effective(context.notes, effective)
        return not list(tables.cdi_problems(effective))
    except (ExitCodeError, DocumentError):
        # The following steps report what is wrong.
        return False


def _condition(problem: str, drop_in: str) -> Condition:
    if problem:
        return false(CONFIGURED, Reason.READ_BACK_FAILED, problem)
    message = f"`containerd config dump` shows what {drop_in} sets, and no other setting is lost"
    return true(CONFIGURED, Reason.READ_BACK, message)


def _changed_by_others(noted: Mapping[str, Any], found_digest: str, planned: PlannedChange, drop_in: str) -> str:
    """Return what somebody changed in the agent's part of the configuration since it was noted; empty if nothing."""
    if not noted.get("drop_in") or noted.get("path") != drop_in:
        return ""
    if planned.drop_in is not None and found_digest != noted["drop_in"]:
        return f"somebody {'changed' if found_digest else 'removed'} {drop_in}"
    return f"somebody removed the import of {drop_in} from {MAIN}" if planned.main is not None else ""


def _edit_runtime_config(context: Context, vendor: MachineVendor) -> None:
    """Set the agent's keys in the configuration file of the handler's program, and keep other keys.

    The file belongs to the program's package. The program reads it whenever a container starts, so no restart is
    needed.
    """
    system, notes = context.system, context.notes
    name, settings = f"runtime-{vendor.name}", json.dumps(vendor.runtime_settings)
    present, noted = files.read_optional(system, vendor.runtime_config), notes.load(name).get("edited")
    if present is not None and noted == [settings, sha256(present)]:
        return
    text = (present or b"").decode(errors="surrogateescape")
    edited = vendor.edit_runtime_config(text)
    content = edited.encode(errors="surrogateescape")
    if content != present:
        files.write(system, vendor.runtime_config, content, 0o644)
        # If other settings are noted, the change is not a repair: an older agent had set other keys.
        if noted and noted[0] == settings:
            record_repair(notes, Repair.RUNTIME, f"somebody changed {vendor.runtime_config}")
    notes.save(name, {"edited": [settings, sha256(content)]})


def _planned_change(
    context: Context,
    version: tuple[int, ...],
    vendor: MachineVendor,
    paths: DropInPaths,
    before: dict[str, bytes | None],
) -> PlannedChange:
    """Return the change that makes containerd load the agent's tables. Raises AgentError or OSError."""
    system, drop_in = context.system, paths.drop_in
    text = before[MAIN] or b""
    main = files.parse(MAIN, text)
    if not main:
        # The main file is missing, or has only comments, which are kept.
        text = files.render_toml({"version": new_version(version)}) + text
    pattern = next((each for each in tables.imports(MAIN, main) if tables.covers(each, drop_in)), "")
    if not pattern:
        # Somebody may have removed the import that is noted. That import may have loaded other files too, so the same
        # pattern is used again if it covers the drop-in.
        former: str = context.notes.load(_note(vendor)).get("import", "")
        known = "*" in former and tables.covers(former, drop_in)
        pattern = former if known else new_import(system, text, drop_in, paths.former)
        text = files.with_import(text, pattern)
    main = files.parse(MAIN, text)
    contents = loaded_files(system, text, drop_in)
    all_loaded = {path: files.parse(path, content) for path, content in contents.items()}
    # Without the former drop-ins, which will be removed.
    order = [path for path in all_loaded if path not in paths.former]
    loaded_later = tuple(order[order.index(drop_in) + 1 :])
    loaded = {path: all_loaded[path] for path in order if path != drop_in}
    configuration = Configuration(main, loaded, {}, loaded_later, drop_in)
    configuration = configuration._replace(dump=_baseline(system, configuration, version))
    document = tables.render(configuration, version, vendor.handler, default=context.handoff.default_runtime)
    try:
        same = before[drop_in] is not None and files.parse(drop_in, before[drop_in] or b"") == document
    except AgentError:
        # The drop-in is no longer TOML.
        same = False
    return PlannedChange(
        main=None if text == before[MAIN] else text,
        drop_in=None if same else files.render_toml(document, files.HEADER),
        baseline=configuration.dump,
        loaded_later=loaded_later,
        document=document,
        version=version,
        pattern=pattern,
        mixture=configuration.mixture(version),
    )


def _baseline(system: System, configuration: Configuration, version: tuple[int, ...]) -> Table:
    """Return containerd's effective configuration for the main file and its imports alone.

    Raises DocumentError if containerd refuses them; also CommandError and OSError.
    """
    imported = list(configuration.imported)
    system.write(BASELINE, files.render_toml(configuration.main | {"imports": imported}), 0o600)
    try:
        return files.effective_config(system, BASELINE, version)
    except ExitCodeError as error:
        raise DocumentError(
            f"containerd refuses {MAIN} and its imports, even without the agent's drop-in (tried as the copy "
            f"{BASELINE}): {error}{configuration.newer_files(version)}",
            "repair these files: containerd cannot start with them either",
        ) from error


def _inputs_digest(context: Context, program: str, vendor: MachineVendor, drop_in: str) -> str:
    """Return a digest of everything that the result of `configure_vendor` depends on.

    That is containerd's program, all files that it loads, the vendor's handler and the default runtime.
    """
    system, default = context.system, context.handoff.default_runtime
    parts = [json.dumps([system.identity(program), vendor.handler, default]).encode()]
    main, own = files.read_optional(system, MAIN), files.read_optional(system, drop_in)
    loaded = loaded_files(system, main or b"", drop_in)
    others = {path: content for path, content in loaded.items() if path != drop_in}
    for path, content in {MAIN: main, drop_in: own, **others}.items():
        parts += [f"\0{path}\0".encode(), b"\0absent" if content is None else content]
    return sha256(b"".join(parts))
