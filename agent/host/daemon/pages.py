"""Makes the page at `/`, for people: conditions with fixes, GPUs, machines, recent changes and links.

The page is plain HTML, and loads no scripts or other resources. Texts that a machine or a tool wrote are escaped.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from html import escape
from http import HTTPStatus

from msgspec import to_builtins
from msgspec.structs import replace

from agent.host.daemon.health import NOT_EVALUATED, Pass, View, check_pages, machine_checks
from agent.host.daemon.metrics import OPENMETRICS, TEXT, Metrics, unseen, without_evidence
from agent.host.daemon.server import OPENMETRICS as OPENMETRICS_KEY
from agent.host.daemon.server import Endpoint, Page, Server, Site
from agent.host.reconcile import NO_MACHINES, MachineOutcome, Outcome, granted_to
from agent.host.verify.gpu_states import listed_gpus
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.facts import Absent, Broken, Facts, MachineFacts, Report, Seen, Unseen, VendorFacts
from agent.model.text import one_line, rfc3339

HTML = "text/html; charset=utf-8"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; color: #1d2125 }
h1 { font-size: 1.35rem } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem }
nav a { margin-right: 1rem } a { color: #0b5cad }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #d8dde2; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top }
th { font-weight: 600 } th, time { white-space: nowrap } td:last-child, li, code { overflow-wrap: anywhere }
code { font: 13px ui-monospace, monospace } .fix { margin: .3rem 0 0; padding-left: 1.1rem }
@media (max-width: 50rem) {
  thead { display: none } tr, td { display: block } tr { border-bottom: 1px solid #d8dde2; padding: .4rem 0 }
  td { border: 0; padding: .1rem 0; overflow-wrap: anywhere } td:empty { display: none }
  td::before { content: attr(data-label) ": "; color: #5c6670 }
}
.True, .False, .Unknown { font-weight: 600; white-space: nowrap }
.True { color: #176b34 } .False { color: #b3261e } .Unknown { color: #8a5300 }
.stale { background: #fdecea; border-left: 4px solid #b3261e; padding: .5rem .8rem }
.note { color: #5c6670 }
@media (prefers-color-scheme: dark) {
  body { background: #16191c; color: #e3e6e9 } a { color: #7db7f0 } th, td { border-color: #363c42 }
  .True { color: #6fcf8b } .False { color: #ff8a80 } .Unknown { color: #f0b45c }
  .stale { background: #3a1d1b } .note, td::before { color: #9aa4ad } tr { border-color: #363c42 }
}
"""
MARKS = {Status.TRUE: "\u2713", Status.FALSE: "\u2717", Status.UNKNOWN: "?"}
"""Signs in addition to the colours, because not all readers can tell the colours apart."""


def front_page(host: str, view: View) -> Page:
    """Return the page of the host named `host`. `view.outcome` must be fresh, or None."""
    title = f"unbounded-agent on {host}"
    parts = [
        "<!DOCTYPE html>\n",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>\n',
        '<meta name="viewport" content="width=device-width">\n',
        f"<style>{STYLE}</style></head><body>\n<h1>{_text(title)}</h1>\n",
        *_heading(view),
        *(part for machine in view.machines for part in _machine(machine, view.fixes.get(machine.name, {}))),
        *((*_gpus(view.outcome), *_trouble(view.outcome)) if view.outcome else ()),
        *_history(view.passes),
        "</body></html>\n",
    ]
    return Page(HTTPStatus.OK, "".join(parts).encode(), HTML)


def _text(text: object) -> str:
    """Return a text on one line, with HTML's special characters escaped."""
    return escape(one_line(str(text)))


def _time(seconds: float) -> str:
    return f"<time>{rfc3339(seconds)}</time>"


def _cell(heading: str, content: str) -> str:
    """Return a cell. A narrow screen shows it in a line of its own, after its heading."""
    return f'<td data-label="{heading}">{content}</td>'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The cells of the rows are HTML."""
    head = "".join(f"<th>{each}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(map(_cell, headings, row))}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def _heading(view: View) -> Iterator[str]:
    yield '<nav aria-label="Pages"><a href="/">Reload</a> '
    links = ["/metrics", "/healthz?verbose", "/readyz?verbose"]
    links += [f"/readyz/machines/{machine.name}?verbose" for machine in view.machines]
    anchors = (f'<a href="{_text(link)}">{_text(link.partition("?")[0])}</a> ' for link in links)
    yield f"{''.join(anchors)}</nav>\n"
    yield f'<p class="note">Version {_text(view.version)}. Written at {_time(view.written)}.</p>\n'
    if view.why_stale:
        yield f'<p class="stale">This host is not observed now: {_text(view.why_stale)}.</p>\n'
    if not view.machines:
        yield f"<p>{_text(NO_MACHINES)}</p>\n"


def _machine(machine: MachineOutcome, fixes: Mapping[ConditionType, tuple[str, ...]]) -> Iterator[str]:
    yield f"<h2>Machine {_text(machine.name)}: {_ready(machine)}</h2>\n"
    # Without fresh evidence, the number of granted GPUs is unknown.
    stale = machine.conditions and machine.ready.reason == Reason.STALE_EVIDENCE
    counts = [] if stale else [f"{len(machine.gpus)} of {machine.expected} GPUs granted"]
    counts += [f"{machine.advertised} advertised"] if machine.advertised is not None else []
    counts += [f"{len(machine.lost)} lost"] if machine.lost else []
    counts += [f"its agent is {machine.agent_version}"] if machine.agent_version else []
    counts += [f"last report at {rfc3339(machine.reported)}"] if machine.reported else []
    if counts:
        yield f'<p class="note">{_text("; ".join(counts))}.</p>\n'
    rows = (_condition(each, fixes.get(each.type, ())) for each in _sorted(machine.conditions))
    yield _table(("Condition", "Status", "Reason", "Since", "Message"), rows)


def _ready(machine: MachineOutcome) -> str:
    if not machine.conditions:
        return NOT_EVALUATED
    ready = machine.ready
    return f'<span class="{ready.status}">{"" if ready.status is Status.TRUE else "not "}ready</span>'


def _sorted(conditions: Iterable[Condition]) -> list[Condition]:
    """Return Ready first, then the conditions that are not True, then those that are True.

    Within each of these two groups, the conditions that Ready needs come first.
    """
    return sorted(
        conditions,
        key=lambda each: (
            each.type is not ConditionType.READY,
            each.status is Status.TRUE,
            not each.needed_for_ready,
        ),
    )


def _condition(condition: Condition, fix: Iterable[str]) -> tuple[str, ...]:
    status = f'<span class="{condition.status}">{MARKS[condition.status]} {condition.status}</span>'
    since = _time(condition.last_transition) if condition.last_transition else ""
    steps = "".join(f"<li><code>{_text(each)}</code></li>" for each in fix)
    message = _text(condition.message) + (f'<ul class="fix" aria-label="Fix">{steps}</ul>' if steps else "")
    return _text(condition.type), status, _text(condition.reason), since, message


def _gpus(outcome: Outcome) -> Iterator[str]:
    rows = [
        tuple(map(_text, (gpu.pci_address, gpu.state, ", ".join(gpu.machines), gpu.model or gpu.vendor, gpu.uuid)))
        for gpu in listed_gpus(outcome.facts, granted_to(outcome.machines))
    ]
    yield "<h2>GPUs</h2>\n"
    yield _table(("Address", "State", "Machine", "Model", "UUID"), rows) if rows else "<p>This host has no GPU.</p>\n"


def _trouble(outcome: Outcome) -> Iterator[str]:
    for title, sentences in (("Failed steps", outcome.failures), ("Notes", outcome.facts.all_problems())):
        if sentences:
            yield f"<h2>{title}</h2>\n<ul>{''.join(f'<li>{_text(each)}</li>' for each in sentences)}</ul>\n"


def _history(passes: Iterable[Pass]) -> Iterator[str]:
    rows = [
        (f"<time>{_text(each.ended)}</time>", _text(each.trigger), _text("; ".join((*each.actions, *each.failures))))
        for each in passes
        if each.actions or each.failures
    ]
    if rows:
        yield "<h2>Recent changes</h2>\n"
        yield _table(("Ended", "Because of", "Changes and failures"), reversed(rows))


def page(view: View) -> Page:
    """Return a JSON page for people who investigate a problem. It has the last facts, even old ones.

    Its keys may change: programs should read the metrics or `status --json`.
    """
    facts = view.outcome.facts if view.outcome else None
    document = {
        "version": view.version,
        "written": rfc3339(view.written),
        "whyNotObserved": view.why_stale,
        "machines": {machine.name: _statusz_machine(machine, facts) for machine in view.machines},
        "facts": _facts(facts) if facts else None,
        "passes": [to_builtins(each) for each in reversed(view.passes)],
        "sources": [to_builtins(tally) for tally in view.wakeups],
        "stuck": view.stuck,
    }
    return Page(HTTPStatus.OK, json.dumps(document, indent=1).encode() + b"\n", "application/json")


def _statusz_machine(machine: MachineOutcome, facts: Facts | None) -> dict[str, object]:
    observed = next((each for each in facts.machines if each.name == machine.name), None) if facts else None
    return {
        "gpus": machine.gpus,
        "lostGPUs": machine.lost,
        "pending": machine.pending,
        "stopped": machine.stopped,
        "conditions": {each.type: _statusz_condition(each) for each in machine.conditions},
        "observed": _observed(observed) if observed else None,
    }


def _statusz_condition(condition: Condition) -> dict[str, str | None]:
    return {key: value for key, value in condition.to_kubernetes().items() if key != "type"}


def _observed(machine: MachineFacts) -> dict[str, object]:
    reported = isinstance(machine.report, Report) or machine.report_age > 0
    return {
        "unitState": _plain(machine.unit_state),
        "unitNeedsReload": machine.unit_needs_reload,
        "deviceAllow": list(map(str, machine.device_allow)),
        "boundNodes": machine.live.nodes if machine.live else None,
        "handedDriverRoots": _plain(machine.handed_roots),
        "reportAgeSeconds": round(machine.report_age, 1) if reported else None,
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


Guard = Callable[[str], AbstractContextManager[None]]
"""Suppresses and logs errors of the work that completes the sentence "cannot ..."."""


def publish(view: View, endpoint: Endpoint, local: Server, metrics: Metrics, evidence: float, guarded: Guard) -> None:
    """Prepare two sets of pages: one to serve now, and one to serve if no pass ends for `evidence` seconds.

    Only the local server gets /statusz. If making a page fails, `guarded` logs the error, and the page says that it
    could not be made.
    """
    late = replace(view, why_stale=f"no pass has ended for {evidence:.0f} s")
    fresh, stale = _pages(view, metrics, guarded), _pages(late, metrics, guarded, alive=False)
    until = time.monotonic() + evidence
    local.site = Site(fresh, stale, until)
    endpoint.publish(Site(_public(fresh), _public(stale), until))


def _public(pages: Mapping[str, Page]) -> dict[str, Page]:
    return {path: page for path, page in pages.items() if path != "/statusz"}


def _pages(view: View, metrics: Metrics, guarded: Guard, *, alive: bool = True) -> dict[str, Page]:
    statusz = partial(page, view)
    not_seen = view.why_stale or (unseen(view.outcome.facts) if view.outcome else "")
    if view.why_stale:
        machines = tuple(without_evidence(machine, view.why_stale) for machine in view.machines)
        view = replace(view, machines=machines, outcome=None, fixes={})
    loop = (alive, "loop", "ok" if alive else "no pass has ended in time")
    # `notes` do not affect the page's status.
    observation = (not not_seen, "observation", not_seen or "ok"), *view.notes
    makers: dict[str, Callable[[], Page | dict[str, Page]]] = {
        "/livez": lambda: check_pages("/livez", [loop]),
        "/healthz": lambda: check_pages("/healthz", [loop]),
        "/readyz": lambda: check_pages("/readyz", observation),
        "/": lambda: front_page(os.uname().nodename, view),
        "/metrics": lambda: metrics.page(view, TEXT),
        "/metrics" + OPENMETRICS_KEY: lambda: metrics.page(view, OPENMETRICS),
        "/statusz": statusz,
    }
    for each in view.machines:
        path = f"/readyz/machines/{each.name}"
        makers[path] = lambda path=path, each=each: check_pages(path, machine_checks(each))  # type: ignore[misc]
    pages: dict[str, Page] = {}
    for path, make in makers.items():
        work = f"make the page {path}"
        text = f"cannot {work}: see `journalctl -u unbounded-agent`\n"
        made: Page | dict[str, Page] = Page(HTTPStatus.INTERNAL_SERVER_ERROR, text.encode())
        # A page is in both sets, and may fail in each for a different reason. So each set has its own name in the log.
        with guarded(work if alive else f"{work} for a time without passes"):
            made = make()
        pages |= made if isinstance(made, dict) else {path: made}
    return pages
