"""Makes the page at `/`, for people: conditions with fixes, GPUs, machines, recent changes and links. Pure.

The page is plain HTML, and loads no scripts or other resources. Texts that a machine or a tool wrote are escaped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from http import HTTPStatus

from agent.host.daemon.http.health import NOT_EVALUATED
from agent.host.daemon.http.server import Page
from agent.host.daemon.http.view import Pass, View
from agent.host.outcome import NO_MACHINES, MachineOutcome, Outcome, granted_to
from agent.host.verify.gpu_list import listed_gpus
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.reasons import Reason
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
    """Yield what the remembered passes changed, and what failed in them, the latest first."""
    rows = [
        (f"<time>{_text(each.ended)}</time>", _text(each.trigger), _text("; ".join((*each.actions, *each.failures))))
        for each in passes
        if each.actions or each.failures
    ]
    if rows:
        yield "<h2>Recent changes</h2>\n"
        yield _table(("Ended", "Because of", "Changes and failures"), reversed(rows))
