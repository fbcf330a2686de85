"""Makes a JSON page for people who investigate a problem: facts, decisions and failures in brief. Pure.

The keys may change: programs should read the metrics or `status --json`.
"""

import json
from http import HTTPStatus

from msgspec import to_builtins

from agent.host.daemon.http.server import Page
from agent.host.daemon.http.view import View
from agent.host.outcome import MachineOutcome
from agent.model.conditions import Condition
from agent.model.facts import Absent, Broken, Facts, MachineFacts, Seen, Unseen, VendorFacts
from agent.model.text import rfc3339


def page(view: View) -> Page:
    """Return the page. It has the facts of the last observation, even of an old one."""
    facts = view.outcome.facts if view.outcome else None
    document = {
        "version": view.version,
        "written": rfc3339(view.written),
        "whyNotObserved": view.why_stale,
        "machines": {machine.name: _machine(machine, facts) for machine in view.machines},
        "facts": _facts(facts) if facts else None,
        "passes": [to_builtins(each) for each in reversed(view.passes)],
        "sources": [to_builtins(tally) for tally in view.wakeups],
        "stuck": view.stuck,
    }
    return Page(HTTPStatus.OK, json.dumps(document, indent=1).encode() + b"\n", "application/json")


def _machine(machine: MachineOutcome, facts: Facts | None) -> dict[str, object]:
    observed = next((each for each in facts.machines if each.name == machine.name), None) if facts else None
    return {
        "gpus": machine.gpus,
        "lostGPUs": machine.lost,
        "pending": machine.pending,
        "stopped": machine.stopped,
        "conditions": {each.type: _condition(each) for each in machine.conditions},
        "observed": _observed(observed) if observed else None,
    }


def _condition(condition: Condition) -> dict[str, str | None]:
    """Return the condition without its type, which is the key."""
    return {key: value for key, value in condition.to_kubernetes().items() if key != "type"}


def _observed(machine: MachineFacts) -> dict[str, object]:
    return {
        "unitState": _plain(machine.unit_state),
        "unitNeedsReload": machine.unit_needs_reload,
        "deviceAllow": list(map(str, machine.device_allow)),
        "boundNodes": machine.live.nodes if machine.live else None,
        "handedDriverRoots": _plain(machine.handed_roots),
        "reportAgeSeconds": round(machine.report_age, 1) if isinstance(machine.report, bytes) else None,
    }


def _facts(facts: Facts) -> dict[str, object]:
    return {
        "architecture": facts.architecture,
        "systemdVersion": _plain(facts.systemd_version),
        "vendors": {vendor.vendor: _vendor(vendor) for vendor in facts.vendors},
        "driverRoots": {root.index: f"{root.vendor} {root.version}" for root in facts.staged},
        "damagedDriverRoots": facts.corrupt_roots,
        "problems": facts.all_problems(),
    }


def _vendor(vendor: VendorFacts) -> dict[str, object]:
    driver = vendor.driver
    nodes = vendor.devices if isinstance(vendor.devices, tuple) else ()
    return {
        "gpus": [to_builtins(gpu) for gpu in vendor.gpus],
        "nodes": {node.path: f"{node.number.major}:{node.number.minor}" for node in nodes} or _plain(vendor.devices),
        "moduleVersion": _plain(driver.module_version) if driver else None,
        "libraryVersion": _plain(driver.user_space.version) if driver else None,
        "fabric": _plain(driver.fabric) if driver else None,
        "persistence": _plain(driver.persistence) if driver else None,
    }


def _plain(seen: Seen[object]) -> object:
    """Return the value of a fact; if there is none, an object with `absent`, `broken` or `unseen` and the reason."""
    if isinstance(seen, Absent | Broken | Unseen):
        return {type(seen).__name__.lower(): seen.why}
    return seen
