"""The page at `/`: complete, escaped, and without anything that a browser would have to fetch or run."""

from html.parser import HTMLParser

from msgspec.structs import replace

from agent.host.daemon.health import Pass, View
from agent.host.daemon.metrics import without_evidence
from agent.host.daemon.pages import HTML, front_page
from agent.host.reconcile import MachineOutcome, Outcome
from agent.model.conditions import Condition, ConditionType, Status
from tests.fakes import eight_gpus
from tests.fakes.reconciler import conditions

EMPTY = View("0.1.0", (), written=1.7e9)
HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m"


class Reader(HTMLParser):
    """Collects tags, attributes, text, and the rows of tables. Fails on tags that are closed in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag != "meta":
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
            if {"td", "th"} & set(self._open):
                self.rows[-1][-1] += data

    def close(self) -> None:
        super().close()
        assert self._open == []


def read(view: View) -> Reader:
    page = front_page("gpu-host-1", view)
    assert page.content_type == HTML
    reader = Reader()
    reader.feed(page.body.decode())
    reader.close()
    assert not {"script", "img", "link", "iframe", "form"} & set(reader.tags)
    assert all(link.startswith("/") for link in reader.links)
    return reader


def test_a_host_with_eight_gpus() -> None:
    view = eight_gpus.view()
    page = read(view)
    assert "unbounded-agent on gpu-host-1" in page.text
    assert "Machine gpu-node: ready" in page.text
    assert "8 of 8 GPUs granted; 8 advertised; its agent is 0.1.0; last report at 2023-11-14T22:13:20Z." in page.text
    assert {row[0] for row in page.rows} >= {*ConditionType, *eight_gpus.ADDRESSES}
    gpu = next(row for row in page.rows if row[0] == eight_gpus.ADDRESSES[3])
    uuid = "GPU-00000000-0000-4000-8000-000000000003"
    assert gpu[1:] == ["granted", "gpu-node", "NVIDIA H100 80GB HBM3", uuid]
    expected = ["/", "/metrics", "/healthz?verbose", "/readyz?verbose", "/readyz/machines/gpu-node?verbose"]
    assert page.links == expected
    assert len(front_page("h", view).body) < 16_000


def test_what_is_wrong_comes_first() -> None:
    lost = Condition(ConditionType.GPUS_COMPLETE, Status.FALSE, "GPULost", "one is lost")
    stopped = Condition(ConditionType.MACHINE_RUNNING, Status.FALSE, "Stopped", "somebody stopped it")
    page = read(replace(EMPTY, machines=(MachineOutcome("gpu-node", conditions(lost, stopped)),)))
    assert "Machine gpu-node: not ready" in page.text
    assert [row[0] for row in page.rows[1:4]] == ["Ready", "MachineRunning", "GPUsComplete"]
    assert page.rows[2][1:3] == ["\u2717 False", "Stopped"]


def test_attack_texts_of_a_machine_stay_texts() -> None:
    strange = Condition(ConditionType.RUNTIME_ACTIVE, Status.FALSE, "Failed", HOSTILE)
    machine = MachineOutcome("gpu-node", conditions(strange), agent_version=HOSTILE)
    facts = replace(eight_gpus.facts(), problems=(HOSTILE,))
    outcome = Outcome(facts, (machine,), failures=(HOSTILE,))
    page = read(View(HOSTILE, (machine,), outcome, why_stale=HOSTILE))
    assert page.text.count("<script>alert(1)</script>&\"'\\x1b[31m") >= 5


def test_without_evidence_nothing_is_claimed() -> None:
    why = "no pass has ended for 180 s"
    page = read(replace(EMPTY, machines=(without_evidence(eight_gpus.view().machines[0], why),), why_stale=why))
    assert "This host is not observed now: no pass has ended for 180 s." in page.text
    assert {row[2] for row in page.rows[1:]} == {"StaleEvidence"}
    assert "Machine gpu-node: not ready" in page.text
    assert not {row[0] for row in page.rows} & set(eight_gpus.ADDRESSES)
    assert "granted" not in page.text


def test_a_host_without_machines_or_gpus() -> None:
    assert "no machine is configured" in read(EMPTY).text
    assert "Machine new: not evaluated" in read(replace(EMPTY, machines=(MachineOutcome("new", ()),))).text
    bare = Outcome(replace(eight_gpus.facts(), vendors=()), ())
    assert "This host has no GPU." in read(replace(EMPTY, outcome=bare)).text


def test_a_fault_has_the_commands_that_fix_it() -> None:
    stopped = Condition(ConditionType.MACHINE_RUNNING, Status.FALSE, "Stopped", "somebody stopped it")
    view = replace(EMPTY, machines=(MachineOutcome("gpu-node", conditions(stopped)),))
    fixes = {"gpu-node": {ConditionType.MACHINE_RUNNING: ("unbounded-agent start gpu-node", HOSTILE)}}
    page = read(replace(view, fixes=fixes))
    row = next(each for each in page.rows if each[0] == "MachineRunning")
    assert row[4].startswith("somebody stopped itunbounded-agent start gpu-node<script>")
    assert "unbounded-agent start" not in read(view).text


def test_what_passes_changed_is_shown_the_latest_first() -> None:
    passes = (
        Pass("2026-11-29T07:00:00Z", "udev", 0.1, actions=("bind /dev/nvidia1",)),
        Pass("2026-11-29T07:01:00Z", "interval", 0.1),
        Pass("2026-11-29T07:02:00Z", "reports", 0.1, failures=("disk full",)),
    )
    page = read(replace(EMPTY, passes=passes))
    assert [row[1:] for row in page.rows[1:]] == [["reports", "disk full"], ["udev", "bind /dev/nvidia1"]]
    assert "Recent changes" not in read(EMPTY).text


def test_the_page_is_for_a_phone_too_and_does_not_reload_itself() -> None:
    """It was 662 pixels wide on a phone of 400, and nobody could stop it from reloading."""
    text = front_page("h", eight_gpus.view()).body.decode()
    assert "http-equiv" not in text
    assert 'content="width=device-width"' in text
    assert "@media (max-width: 50rem)" in text
    assert '<td data-label="Reason">' in text
    assert "<time>" in text
