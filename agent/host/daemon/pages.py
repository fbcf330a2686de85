"""Makes the pages: checks for probes, one for people at `/`, and one with all that the service knows at `/statusz`.

The page for people is plain HTML, and loads no scripts or other resources. Texts that a machine or a tool wrote are
escaped.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from html import escape
from http import HTTPStatus
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agent.host.daemon.health import NOT_EVALUATED, Check, View
from agent.host.daemon.metrics import OPENMETRICS, TEXT, Metrics, unseen, without_evidence
from agent.host.daemon.server import OPENMETRICS as OPENMETRICS_KEY
from agent.host.daemon.server import VERBOSE, Endpoint, Page, Server, Site
from agent.host.reconcile import NO_MACHINES, MachineOutcome, granted_to
from agent.host.verify.gpu_states import listed_gpus
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.facts import Absent, Broken, Unseen
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


def check_pages(path: str, checks: Sequence[Check]) -> dict[str, Page]:
    """Return the short and the verbose page of a path. The first check decides their status.

    If that check fails, both are verbose, so that the short page explains the failure, as in Kubernetes.
    """
    good = checks[0][0]
    lines = [f"[{'+' if passed else '-'}]{one_line(f'{name} {text}')}" for passed, name, text in checks]
    lines.append(f"{path[1:]} check {'passed' if good else 'failed'}")
    status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    verbose = Page(status, "".join(f"{line}\n" for line in lines).encode())
    return {path: Page(HTTPStatus.OK, b"ok\n") if good else verbose, path + VERBOSE: verbose}


def machine_checks(machine: MachineOutcome) -> list[Check]:
    """Return the checks of a machine. Only the first one, Ready, decides the page's status; the others explain it."""
    others = (each for each in machine.conditions if each.type is not ConditionType.READY)
    return (
        [
            (each.status is Status.TRUE, each.type, f"{each.status} {each.reason}: {each.message}")
            for each in (machine.ready, *others)
        ]
        if machine.conditions
        else [(False, ConditionType.READY, NOT_EVALUATED)]
    )


def _text(text: object) -> str:
    """Return a text on one line, with HTML's special characters escaped."""
    return escape(one_line(str(text)))


def _time(seconds: float) -> str:
    return f"<time>{rfc3339(seconds)}</time>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The cells of the rows are HTML. A narrow screen shows each in a line, after its heading."""
    head = "".join(f"<th>{each}</th>" for each in headings)
    body = ""
    for row in rows:
        cells = (f'<td data-label="{heading}">{cell}</td>' for heading, cell in zip(headings, row, strict=True))
        body += f"<tr>{''.join(cells)}</tr>\n"
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def front_page(host: str, view: View) -> Page:
    """Return the page of the host named `host`. `view.outcome` must be fresh, or None."""
    title, outcome = f"unbounded-agent on {_text(host)}", view.outcome
    links = ["/metrics", "/healthz?verbose", "/readyz?verbose"]
    links += [f"/readyz/machines/{machine.name}?verbose" for machine in view.machines]
    anchors = (f'<a href="{_text(link)}">{_text(link.partition("?")[0])}</a> ' for link in links)
    parts = [
        "<!DOCTYPE html>\n",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n',
        '<meta name="viewport" content="width=device-width">\n',
        f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n",
        f'<nav aria-label="Pages"><a href="/">Reload</a> {"".join(anchors)}</nav>\n',
        f'<p class="note">Version {_text(view.version)}. Written at {_time(view.written)}.</p>\n',
    ]
    if view.why_stale:
        parts.append(f'<p class="stale">This host is not observed now: {_text(view.why_stale)}.</p>\n')
    if not view.machines:
        parts.append(f"<p>{_text(NO_MACHINES)}</p>\n")
    parts += [_machine(machine, view.fixes.get(machine.name, {})) for machine in view.machines]
    if outcome:
        gpus = [
            [_text(each) for each in (gpu.pci_address, gpu.state, ", ".join(gpu.machines), gpu.model or gpu.vendor)]
            + [_text(gpu.uuid)]
            for gpu in listed_gpus(outcome.facts, granted_to(outcome.machines))
        ]
        headings = ("Address", "State", "Machine", "Model", "UUID")
        parts += ["<h2>GPUs</h2>\n", _table(headings, gpus) if gpus else "<p>This host has no GPU.</p>\n"]
        checks = [f"{each.type}: {each.text}" for each in outcome.facts.checks]
        lists = (("Checks", checks), ("Failed steps", outcome.failures), ("Notes", outcome.facts.all_problems()))
        for heading, sentences in lists:
            if sentences:
                items = "".join(f"<li>{_text(each)}</li>" for each in sentences)
                parts.append(f"<h2>{heading}</h2>\n<ul>{items}</ul>\n")
    changes = [
        (f"<time>{_text(each.ended)}</time>", _text(each.trigger), _text("; ".join((*each.actions, *each.failures))))
        for each in reversed(view.passes)
        if each.actions or each.failures
    ]
    if changes:
        parts += ["<h2>Recent changes</h2>\n", _table(("Ended", "Because of", "Changes and failures"), changes)]
    return Page(HTTPStatus.OK, "".join((*parts, "</body></html>\n")).encode(), HTML)


def _machine(machine: MachineOutcome, fixes: Mapping[ConditionType, tuple[str, ...]]) -> str:
    ready = f'<span class="{machine.ready.status}">{"" if machine.ready.status is Status.TRUE else "not "}ready</span>'
    # Without fresh evidence, the number of granted GPUs is unknown.
    stale = machine.conditions and machine.ready.reason == Reason.STALE_EVIDENCE
    counts = [] if stale else [f"{len(machine.gpus)} of {machine.expected} GPUs granted"]
    counts += [f"{machine.advertised} advertised"] if machine.advertised is not None else []
    counts += [f"{len(machine.lost)} lost"] if machine.lost else []
    counts += [f"its agent is {machine.agent_version}"] if machine.agent_version else []
    counts += [f"last report at {rfc3339(machine.reported)}"] if machine.reported else []
    rows = []
    # Ready first, then what is not True, then what is; in each of these groups, first what Ready needs.
    for each in sorted(
        machine.conditions,
        key=lambda each: (each.type is not ConditionType.READY, each.status is Status.TRUE, not each.needed_for_ready),
    ):
        status = f'<span class="{each.status}">{MARKS[each.status]} {each.status}</span>'
        since = _time(each.last_transition) if each.last_transition else ""
        steps = "".join(f"<li><code>{_text(step)}</code></li>" for step in fixes.get(each.type, ()))
        message = _text(each.message) + (f'<ul class="fix" aria-label="Fix">{steps}</ul>' if steps else "")
        rows.append((_text(each.type), status, _text(each.reason), since, message))
    return (
        f"<h2>Machine {_text(machine.name)}: {ready if machine.conditions else NOT_EVALUATED}</h2>\n"
        + (f'<p class="note">{_text("; ".join(counts))}.</p>\n' if counts else "")
        + _table(("Condition", "Status", "Reason", "Since", "Message"), rows)
    )


BULKY = frozenset({"files"})
"""Fields that /statusz leaves out: a driver has hundreds of files."""


def statusz(view: View) -> Page:
    """Return a JSON page for people who investigate a problem. It has the last facts, even old ones.

    Its keys may change: programs should read the metrics or `status --json`.
    """
    facts = view.outcome.facts if view.outcome else None
    document = {
        "version": view.version,
        "written": rfc3339(view.written),
        "whyNotObserved": view.why_stale,
        "machines": {machine.name: _plain(machine) for machine in view.machines},
        "facts": _plain(facts),
        "passes": _plain(tuple(reversed(view.passes))),
        "sources": _plain(view.wakeups),
        "stuck": view.stuck,
    }
    return Page(HTTPStatus.OK, json.dumps(document, indent=1).encode() + b"\n", "application/json")


def _plain(value: Any) -> object:  # noqa: ANN401
    """Return a value as json.dumps accepts it. What was not observed is an object with its kind and the reason."""
    if isinstance(value, Condition):
        return value.to_kubernetes()
    if isinstance(value, Absent | Broken | Unseen):
        return {type(value).__name__.lower(): value.why}
    if isinstance(value, Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__ if name not in BULKY}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list | Set):
        return [_plain(each) for each in value]
    finite = isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if finite else str(value)


Guard = Callable[[str], AbstractContextManager[object]]
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
    public = [{path: page for path, page in pages.items() if path != "/statusz"} for pages in (fresh, stale)]
    endpoint.publish(Site(public[0], public[1], until))


def _pages(view: View, metrics: Metrics, guarded: Guard, *, alive: bool = True) -> dict[str, Page]:
    not_seen, complete = view.why_stale or (unseen(view.outcome.facts) if view.outcome else ""), view
    if view.why_stale:
        machines = tuple(without_evidence(machine, view.why_stale) for machine in view.machines)
        view = replace(view, machines=machines, outcome=None, fixes={})
    loop = (alive, "loop", "ok" if alive else "no pass has ended in time")
    checks: dict[str, Sequence[Check]] = {
        "/livez": [loop],
        "/healthz": [loop],
        # `notes` do not affect the page's status.
        "/readyz": [(not not_seen, "observation", not_seen or "ok"), *view.notes],
        **{f"/readyz/machines/{machine.name}": machine_checks(machine) for machine in view.machines},
    }
    makers: dict[str, Callable[[], Page]] = {
        "/": partial(front_page, os.uname().nodename, view),
        "/metrics": partial(metrics.page, view, TEXT),
        "/metrics" + OPENMETRICS_KEY: partial(metrics.page, view, OPENMETRICS),
        "/statusz": partial(statusz, complete),
    }
    pages = {path: page for each, found in checks.items() for path, page in check_pages(each, found).items()}
    for path, make in makers.items():
        work = f"make the page {path}"
        text = f"cannot {work}: see `journalctl -u unbounded-agent`\n"
        pages[path] = Page(HTTPStatus.INTERNAL_SERVER_ERROR, text.encode())
        # A page is in both sets, and may fail in each for a different reason. So each set has its own name in the log.
        with guarded(work if alive else f"{work} for a time without passes"):
            pages[path] = make()
    return pages
