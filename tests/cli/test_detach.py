"""Detaching a GPU: whole passes over a simulated host, whose machine reports whenever somebody waits for it.

The processes are synthetic, and exit when a test says so. New pods are kept from a GPU that the node offers itself
(`allocation = "dra"`) before it is withdrawn, and pods that have it are evicted.
"""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.detach import Ending, Timing, attach, detach, holders
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import GRANTED, forget_detached, observe_gpus, record_detached
from agent.host.state.locks import pass_lock
from agent.model.conditions import ConditionType, Status
from agent.model.contract import Effect, GpuState, parse_gpu_states
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import DeviceAllow, Unseen, parse_live
from agent.model.handoff import FabricAnswer
from agent.model.paths import GPUS, gpu_states_file, granted_file, handoff_file, live_file, node_record, nspawn_file
from tests.fakes.clock import Clock
from tests.fakes.detach_site import FAST, HOLDER, Interrupted, Site
from tests.fakes.gpu_host import MACHINE, UNITS, units
from tests.fakes.processes import POD_GROUP, process

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Site:
    site = Site(tmp_path / "host", clock)
    site.start()
    return site


def text(ending: Ending) -> str:
    return "\n".join(ending.sentences)


def allowed(site: Site) -> tuple[DeviceAllow, ...]:
    return parse_live(site.host.read(live_file(MACHINE))).allow


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_gpu_that_nobody_uses_may_be_removed(site: Site) -> None:
    """And is given back. If the permission went before the specification, a new pod could get a node that does not
    open."""
    assert site.permitted()
    order: list[tuple[tuple[str, ...], bool]] = []
    site.meanwhile = [lambda: order.append((site.granted(), site.permitted()))]
    ending = detach(SECOND, site.agent, FAST)
    assert ending.done, text(ending)
    assert f"{SECOND} may be removed" in text(ending)
    assert order == [((FIRST,), True)]
    assert (site.granted(), site.permitted()) == ((FIRST,), False)
    assert b"/dev/nvidia1\n" not in site.host.read(nspawn_file(MACHINE))
    conditions = site.conditions()
    assert conditions[ConditionType.DEVICES_PRESENT] == (Status.TRUE, "GPUDetached")
    assert conditions[ConditionType.READY] == (Status.TRUE, "AllConditionsTrue")
    ending = attach(SECOND, site.agent, FAST)
    assert ending.done, text(ending)
    assert (site.granted(), site.permitted()) == ((FIRST, SECOND), True)
    assert "not detached: nothing to do" in text(attach(SECOND, site.agent, FAST))


def test_a_process_that_cannot_be_inspected_is_reported_and_decides_nothing(site: Site) -> None:
    """Any pod can have such a process forever."""
    for pid in range(30, 45):
        process(Path(site.host.root), pid)
        site.host.failing[f"/proc/{pid}/task/{pid}/maps"] = PermissionError(13, "Permission denied")
    ending = detach(SECOND, site.agent, FAST)
    assert ending.done, text(ending)
    assert f"{SECOND} may be removed: no process that could be inspected has it open" in ending.sentences[0]
    assert "cannot inspect PID 30: Permission denied" in ending.sentences
    assert ending.sentences[-1] == "and 5 more cannot be inspected"
    assert holders(SECOND, site.agent)[0] == f"{SECOND}: no process that could be inspected has it open"


def test_a_gpu_whose_users_cannot_be_determined_is_left_as_it_is(site: Site) -> None:
    """With another driver, or without a node, the device number to search for is unknown."""
    site.host.remove_file("/dev/nvidia1")
    site.host.rebind(FIRST, "vfio-pci")
    site.host.remove_file(f"/proc/driver/nvidia/gpus/{FIRST}/information")
    for address, driver in ((FIRST, "vfio-pci"), (SECOND, "nvidia")):
        ending = detach(address, site.agent, FAST)
        assert not ending.done
        why = f"cannot determine who uses it: it is bound to kernel driver {driver} and has no usable device node"
        assert f"{address} was not detached: {why}" in ending.sentences[0]
        (line,) = holders(address, site.agent)
        assert line.startswith(f"{address}: {why}")
    assert not site.host.exists(GPUS)
    site.host.rebind(FIRST, "")
    assert detach(FIRST, site.agent, FAST).done, "without a driver nothing can have it open"


def test_refuse_changes_nothing(site: Site) -> None:
    site.hold(group=POD_GROUP, inner=(77, 1), command=b"train")
    before = site.host.read(handoff_file(MACHINE))
    ending = detach(SECOND, site.agent, FAST)
    assert not ending.done
    assert "is in use; nothing was changed" in ending.sentences[0]
    assert f"PID {HOLDER} (train), machine gpu-node (PID 77 there), pod" in ending.sentences[1]
    assert site.host.read(handoff_file(MACHINE)) == before
    assert not site.host.exists(GPUS)
    assert detach(FIRST, site.agent, FAST).done, "the other GPU is not in use"


def test_the_message_says_that_the_device_plugin_needs_a_restart(site: Site) -> None:
    """The device plugin has every GPU open, so `refuse` would always refuse. On the host, the name means nothing."""
    directory = site.hold(group=POD_GROUP, command=b"nvidia-device-p")
    advice = 'machines.NAME.restart_device_plugin = true and on_detach = "drain-wait"'
    assert advice in text(detach(SECOND, site.agent, FAST))
    shutil.rmtree(directory)
    directory = site.hold(command=b"nvidia-device-p")
    assert advice not in text(detach(SECOND, site.agent, FAST))
    shutil.rmtree(directory)
    site.hold(group=POD_GROUP, command=b"dcgm-exporter")
    assert "delete the pod while `gpus detach` waits" in text(detach(SECOND, site.agent, FAST))


@pytest.mark.parametrize(("gpus", "granted"), [("all", (FIRST, SECOND)), ("count=1", (SECOND,))])
def test_refuse_returns_a_gpu_that_was_opened_meanwhile(site: Site, gpus: str, granted: tuple[str, ...]) -> None:
    """A pod may start between the check and the withdrawal of the specification.

    If a number is configured, the GPU at the lower address would have been its replacement.
    """
    site.configure(gpus=[*granted]).reconcile()
    agent = site.configure(gpus=gpus)
    site.meanwhile = [site.hold]
    ending = detach(SECOND, agent, FAST)
    assert not ending.done
    assert "was opened in the meantime, and is granted as before" in ending.sentences[0]
    assert (site.granted(), site.permitted()) == (granted, True)


def test_drain_wait_waits_for_the_users_to_exit(site: Site) -> None:
    agent = site.configure(on_detach="drain-wait")
    directory = site.hold()
    during: list[tuple[tuple[str, ...], bool]] = []
    site.meanwhile = [
        lambda: None,
        lambda: during.append((site.granted(), site.permitted())),
        lambda: shutil.rmtree(directory),
    ]
    ending = detach(SECOND, agent, FAST)
    assert ending.done, text(ending)
    assert during == [((FIRST,), True)], "no new pod gets it, and its users may open it again"
    assert not site.permitted()


def test_drain_wait_leaves_it_drained_when_the_time_is_over(site: Site) -> None:
    """As with a node that could not be drained, the GPU gets no new work, and a second call continues to wait."""
    agent = site.configure(on_detach="drain-wait", drain_wait=0)
    directory = site.hold()
    ending = detach(SECOND, agent, FAST)
    assert not ending.done
    assert "is withheld from new pods, but is still in use after 0 s" in ending.sentences[0]
    assert (site.granted(), site.permitted()) == ((FIRST,), True)
    site.agent.reconcile()
    assert site.permitted(), "every pass leaves it to its users"
    shutil.rmtree(directory)
    assert detach(SECOND, agent, FAST).done
    assert not site.permitted()


def test_a_drained_gpu_stays_with_its_machine_and_is_then_replaced(site: Site) -> None:
    """If a number of GPUs is configured, another one takes its place only when its users have exited."""
    agent = site.configure(gpus="count=1", on_detach="drain-wait", drain_wait=0)
    agent.reconcile()
    assert site.granted() == (FIRST,)
    directory = site.hold(device="/dev/nvidia0")
    for _ in range(2):
        assert "is withheld from new pods" in detach(FIRST, agent, FAST).sentences[0]
        assert site.granted_gpus() == ()
    assert f"{FIRST} was given back to {MACHINE}" in text(attach(FIRST, agent, FAST))
    assert site.granted() == (FIRST,)
    assert not detach(FIRST, agent, FAST).done
    shutil.rmtree(directory)
    assert DeviceAllow("/dev/char/195:0", "rw") in allowed(site)
    assert detach(FIRST, agent, FAST).done
    assert site.granted() == (SECOND,)
    assert DeviceAllow("/dev/char/195:0", "rw") not in allowed(site)
    assert f"{FIRST} is no longer detached; no machine's settings ask for it" in text(attach(FIRST, agent, FAST))
    assert site.granted() == (SECOND,)


@pytest.mark.parametrize("error", [Interrupted(), OSError(5, "Input/output error"), AgentError("simulated")])
@pytest.mark.parametrize(("policy", "left"), [("refuse", False), ("drain-wait", True), ("force", True)])
def test_a_failure_leaves_no_note_of_a_refused_gpu(site: Site, policy: str, left: bool, error: BaseException) -> None:
    """A refused GPU must not stay out of use unnoticed. If the note stays, the last message says how to revert."""
    agent = site.configure(on_detach=policy)
    site.meanwhile = [raising(error)]
    with pytest.raises(type(error)):
        detach(SECOND, agent, FAST)
    assert (SECOND in observe_gpus(site.host).detached) is left
    last_message = site.messages[-1]
    assert (f"`unbounded-agent gpus attach {SECOND}`" in last_message) is left
    site.agent.reconcile()
    assert site.granted() == ((FIRST,) if left else (FIRST, SECOND))


@pytest.mark.parametrize(("policy", "held", "steps"), [
    ("drain-wait", True, 0), ("drain-wait", True, 1), ("drain-wait", True, 2),
    ("refuse", False, 0), ("force", False, 0),
])  # fmt: skip
def test_a_gpu_that_somebody_attaches_meanwhile_stays_attached(site: Site, policy: str, held: bool, steps: int) -> None:
    """While a machine's report is waited for, or the GPU's users are."""
    agent = site.configure(on_detach=policy, drain_wait=20)
    if held:
        site.hold()

    def attach() -> None:
        with pass_lock(site.host, site.messages.append):
            forget_detached(site.host, SECOND)

    site.meanwhile = [*[lambda: None] * steps, attach]
    with pytest.raises(AgentError, match=f"{SECOND} was attached, or left the PCI bus, in the meantime"):
        detach(SECOND, agent, FAST)
    assert sum(" to release " in each for each in site.messages) <= 1, "one for each pass that waits"
    assert not site.meanwhile
    assert SECOND not in observe_gpus(site.host).tainted
    site.agent.reconcile()
    assert site.granted() == (FIRST, SECOND)
    assert site.permitted()


def test_a_detached_gpu_stays_detached_if_another_attempt_fails(site: Site) -> None:
    assert record_detached(site.host, SECOND, draining=True)
    site.answers = False
    site.meanwhile = [raising(Interrupted())]
    with pytest.raises(Interrupted):
        detach(SECOND, site.agent, FAST)
    assert SECOND in observe_gpus(site.host).detached


def test_only_one_command_detaches_a_gpu(site: Site) -> None:
    """If it failed, it would undo what the other one has just promised."""
    others: list[Ending] = []

    def detach_both() -> None:
        others.append(detach(FIRST, site.agent, FAST))
        detach(SECOND, site.agent, FAST)

    site.meanwhile = [detach_both]
    with pytest.raises(AgentError, match=f"another `gpus detach`, .* of {SECOND} is still running"):
        detach(SECOND, site.agent, FAST)
    assert others[0].done


def test_refuse_does_not_return_a_gpu_that_was_detached_before(site: Site) -> None:
    assert detach(SECOND, site.agent, FAST).done
    site.forget_report()

    def open_it() -> None:
        site.hold()
        site.answer()

    site.meanwhile = [open_it]
    ending = detach(SECOND, site.agent, FAST)
    assert "is withheld from new pods, but is still in use; repeat" in text(ending)
    assert (site.granted(), site.permitted()) == ((FIRST,), False)


def test_the_last_gpu_is_drained_with_the_nodes_that_all_share(site: Site) -> None:
    """CUDA opens /dev/nvidiactl and /dev/nvidia-uvm too, again and again."""
    agent = site.configure(on_detach="drain-wait", drain_wait=0)
    assert detach(FIRST, agent, FAST).done
    site.hold()
    assert not detach(SECOND, agent, FAST).done
    allow = {each.node for each in allowed(site)}
    assert {"/dev/char/195:1", "/dev/char/195:255", "/dev/char/511:0"} <= allow
    assert "/dev/char/195:0" not in allow
    assert site.conditions()[ConditionType.READY] == (Status.TRUE, "GPUDetached")


def test_force_takes_the_gpu_and_names_its_users(site: Site) -> None:
    agent = site.configure(on_detach="force")
    site.hold(command=b"nvidia-persiste")
    ending = detach(SECOND, agent, FAST)
    assert not ending.done
    assert "still in use: do not remove it yet" in ending.sentences[0]
    assert f"nvidia-smi -i {SECOND} -pm 0" in ending.sentences[1]
    assert (site.granted(), site.permitted()) == ((FIRST,), False)


def test_a_machine_that_never_answers_loses_the_permission(site: Site) -> None:
    site.forget_report()
    ending = detach(SECOND, site.agent, Timing(poll=0, answer=0))
    assert ending.done, text(ending)
    assert f"machine {MACHINE} did not remove {SECOND} from its CDI specification" in text(ending)
    assert not site.permitted()


def test_a_machine_with_unknown_settings_may_still_open_the_gpu(site: Site) -> None:
    """Devices can be withdrawn from a machine only if a record says which ones it was started with."""
    site.host.remove_file(live_file(MACHINE))
    ending = detach(SECOND, site.agent, FAST)
    assert not ending.done
    assert f"{MACHINE} can still open it" in ending.sentences[0]
    assert f"only `unbounded-agent restart {MACHINE} --kubeconfig FILE` (" in text(ending)
    assert "withdraws the GPU" in text(ending)


def test_a_stopped_machine_is_not_waited_for(site: Site) -> None:
    units(site.host, "inactive")
    assert detach(SECOND, site.agent, FAST).done
    assert not [each for each in site.messages if each.startswith("wait")]
    site.plug(SECOND)
    site.agent.reconcile()
    assert b"/dev/nvidia1\n" in site.host.read(nspawn_file(MACHINE)), "a replugged GPU is granted as usual"


def test_attach_waits_for_an_answer_to_its_own_publication(site: Site) -> None:
    """The handoff is the same as before the detachment, and so is what the machine reported on it."""
    before = site.publication()
    assert detach(SECOND, site.agent, FAST).done
    site.answers = False
    site.meanwhile = [lambda: site.answer(before), site.answer]
    ending = attach(SECOND, site.agent, FAST)
    assert ending.done, text(ending)
    assert site.meanwhile == []


@pytest.mark.parametrize(
    ("kind", "reason", "registration"),
    [
        (ConditionType.DEVICES_ALLOWED, "GPUFailed", "Success"),
        (ConditionType.CDI_SPEC_CURRENT, "GPUMissing", "Success"),
        # The GPU may be registered with its fabric now. The machine asked it minutes later.
        (ConditionType.FABRIC_READY, "FabricFailed", "Unknown Error"),
    ],
)
def test_attach_lets_a_machine_open_a_gpu_again_that_was_reset(
    site: Site, kind: ConditionType, reason: str, registration: str
) -> None:
    """Nothing else on the host changes after a reset."""
    site.failing = {kind: reason}
    site.fabric = (FabricAnswer(FIRST, "Completed", "Success"), FabricAnswer(SECOND, "Completed", registration))
    site.answer()
    assert site.conditions()[kind] == (Status.FALSE, reason)
    before = site.publication()
    site.failing.clear()
    site.fabric = tuple(FabricAnswer(gpu, "Completed", "Success") for gpu in (FIRST, SECOND))
    site.agent.reconcile()
    assert site.publication() == before
    ending = attach(SECOND, site.agent, FAST)
    assert ending.done, text(ending)
    assert text(ending).startswith(f"{SECOND} is not detached; asked {MACHINE} to open it again")
    assert site.publication() != before
    conditions = site.conditions()
    assert conditions[kind][0] is Status.TRUE
    assert conditions[ConditionType.READY] == (Status.TRUE, "AllConditionsTrue")
    published = site.publication()
    assert "not detached: nothing to do" in text(attach(SECOND, site.agent, FAST))
    assert site.publication() == published


@pytest.mark.parametrize(("foreign", "reason"), [(True, "ForeignFile"), (False, "MachineRestartNeeded")])
def test_attach_asks_no_machine_that_has_no_handoff_or_only_needs_a_restart(
    site: Site, foreign: bool, reason: str
) -> None:
    """The agent publishes nothing for a machine with somebody else's settings. `attach` ended with an error."""
    if foreign:
        site.host.write(nspawn_file(MACHINE), b"[Exec]\n")
    else:
        site.host.remove(live_file(MACHINE))
    assert site.conditions()[ConditionType.DEVICES_ALLOWED] == (Status.FALSE, reason)
    assert text(attach(SECOND, site.agent, FAST)) == f"{SECOND} is not detached: nothing to do"


@pytest.mark.parametrize("name", ["01:00.0", "00000000:01:00.0", "GPU-00000000-0000-4000-8000-000000000000"])
def test_a_gpu_by_any_of_its_names(site: Site, name: str) -> None:
    """As lspci and nvidia-smi print them, and as the configuration may name it."""
    assert detach(name, site.agent, FAST).done
    site.agent.reconcile()
    assert site.granted() == (SECOND,)
    assert attach(name, site.agent, FAST).done
    assert site.granted() == (FIRST, SECOND)


def test_an_unknown_address_is_bad_input(site: Site) -> None:
    for address in ("0000:ff:00.0", "all", "", "\x1b[2J"):
        with pytest.raises(ConfigError, match=f"no GPU has this PCI address.*{FIRST}"):
            detach(address, site.agent, FAST)
    with pytest.raises(ConfigError):
        attach("0000:ff:00.0", site.agent, FAST)
    site.host.drm = Unseen("/sys/class/drm: Permission denied")
    with pytest.raises(AgentError, match="Permission denied"):
        detach(SECOND, site.agent, FAST)
    with pytest.raises(AgentError, match="Permission denied"):
        holders("", site.agent)


@pytest.mark.parametrize("state", ["unseen", "starting", "a node of up", "may open it", "live unseen"])
def test_a_machine_that_cannot_be_changed_now_keeps_its_gpu(site: Site, state: str) -> None:
    """Something else could not be observed, or the machine is not configured, but starts with the settings it had."""
    agent = Reconciler(Config(machines={}), site.host, site.host)
    units(site.host, "inactive" if state in ("starting", "a node of up") else "active", stopped_at=1)
    said = ""
    if state == "unseen":
        agent = site.configure(gpus="count=2")
        site.host.failing["/var/lib/unbounded-agent/driver-roots"] = PermissionError(13, "Permission denied")
    elif state in ("may open it", "live unseen"):
        granted = GRANTED.parse("", site.host.read(granted_file(MACHINE)))
        site.host.write(granted_file(MACHINE), GRANTED.render(replace(granted, gpus=(FIRST,))))
        if state == "live unseen":
            site.host.failing[live_file(MACHINE)] = OSError(errno.EIO, "Input/output error")
    elif state == "starting":
        site.host.bus.jobs[UNITS[0]] = "start"
    else:
        site.host.file(node_record(MACHINE), "{}")
        said = f".*unbounded-agent reset {MACHINE}"
    with pytest.raises(AgentError, match=f"cannot change machine {MACHINE}: {said}"):
        detach(SECOND, agent, FAST)
    assert not observe_gpus(site.host).detached


@pytest.mark.parametrize(
    ("gpus", "granted", "reason"),
    [
        ("count=1", (SECOND,), "Present"),
        ("count=2", (SECOND,), "GPUDetached"),
        ("count=3", (SECOND,), "GPUNotFound"),
        ([FIRST, SECOND], (SECOND,), "GPUDetached"),
        ([FIRST, "0000:03:00.0"], (), "GPUNotFound"),
    ],
)
def test_the_replacement_of_a_detached_gpu(tmp_path: Path, gpus: object, granted: tuple[str, ...], reason: str) -> None:
    """If a number is configured and another GPU is free, the machine gets that, as for a GPU that is gone."""
    site = Site(tmp_path / "host")
    site.configure(gpus=gpus)
    site.start()
    assert record_detached(site.host, FIRST, draining=False)
    outcome = site.agent.reconcile()
    assert site.granted() == granted
    assert site.conditions()[ConditionType.DEVICES_PRESENT][1] == reason
    assert outcome.machines[0].gpus == granted


@pytest.mark.parametrize(("required", "status"), [(False, Status.TRUE), (True, Status.FALSE)])
def test_a_machine_without_its_only_gpu(site: Site, required: bool, status: Status) -> None:
    site.configure(require_gpus=required)
    for address in (FIRST, SECOND):
        assert record_detached(site.host, address, draining=False)
    assert site.conditions()[ConditionType.READY] == (status, "GPUDetached")


def test_holders_are_listed_by_gpu(site: Site) -> None:
    site.hold()
    assert holders("", site.agent) == (
        f"{FIRST}: no process has it open",
        f"{SECOND}: PID {HOLDER} (python3): /dev/nvidia1",
    )
    assert holders(SECOND.upper(), site.agent) == holders("", site.agent)[1:]


def test_a_damaged_note_is_discarded_and_reported(site: Site) -> None:
    """One that cannot be read grants nothing."""
    for content in (b"", b"[]", b'{"0000:02:00.0": 1}', b'{"0000:02:00.0": {}}', b"\xff"):
        site.host.write(GPUS, content)
        outcome = site.agent.reconcile()
        assert any(GPUS in problem for problem in outcome.facts.problems), content
        assert site.granted() == (FIRST, SECOND)
        assert record_detached(site.host, SECOND, draining=True)
        assert observe_gpus(site.host).draining == {SECOND}
    site.host.failing[GPUS] = OSError(5, "Input/output error")
    with pytest.raises(AgentError, match=GPUS):
        site.agent.reconcile()


def test_each_note_is_about_one_gpu(site: Site) -> None:
    assert record_detached(site.host, FIRST, draining=False)
    assert record_detached(site.host, SECOND, draining=True)
    assert not record_detached(site.host, "0000:0f:00.0", draining=True), "there is no such device"
    forget_detached(site.host, FIRST)
    assert observe_gpus(site.host).detached == {SECOND}


# ---- a GPU that the node offers itself


AT_ONCE = Timing(poll=0, answer=20, taint=0, eviction=0)
HEALTHY = (GpuState.HEALTHY, Effect.NONE)
TAINTED = (GpuState.DRAINING, Effect.NO_SCHEDULE)
EVICTED = (GpuState.DRAINING, Effect.NO_EXECUTE)


@pytest.fixture
def offered(tmp_path: Path, clock: Clock) -> Site:
    site = Site(tmp_path / "host", clock)
    site.configure(allocation="dra")
    site.start()
    return site


def state(offered: Site) -> tuple[GpuState, Effect]:
    found = parse_gpu_states(offered.host.read(gpu_states_file(MACHINE)))[SECOND]
    return found.state, found.effect


def watched(offered: Site, policy: str, steps: int) -> list[tuple[object, tuple[str, ...]]]:
    seen: list[tuple[object, tuple[str, ...]]] = []
    offered.meanwhile = [lambda: seen.append((state(offered), offered.granted()))] * steps
    assert detach(SECOND, offered.configure(allocation="dra", on_detach=policy), AT_ONCE).done
    return seen


def test_it_is_tainted_before_it_is_withdrawn(offered: Site) -> None:
    assert state(offered) == HEALTHY
    assert watched(offered, "refuse", 2) == [(TAINTED, (FIRST, SECOND)), (TAINTED, (FIRST,))]
    assert state(offered) == TAINTED, "until it has left the bus"
    # The next detachment does not give it back. Its taint alone would: tainted GPUs stay granted.
    assert watched(offered, "refuse", 1) == [(TAINTED, (FIRST,))]
    assert attach(SECOND, offered.agent, AT_ONCE).done
    assert (state(offered), offered.granted()) == (HEALTHY, (FIRST, SECOND))


def test_refuse_returns_a_gpu_that_a_pod_got_meanwhile(offered: Site) -> None:
    """One that a pod has had before is not even tainted."""
    offered.meanwhile = [offered.hold]
    ending = detach(SECOND, offered.agent, AT_ONCE)
    assert "was opened in the meantime, and is granted as before" in ending.sentences[0]
    assert (state(offered), offered.granted()) == (HEALTHY, (FIRST, SECOND))
    assert not detach(SECOND, offered.agent, AT_ONCE).done
    assert (state(offered), offered.granted()) == (HEALTHY, (FIRST, SECOND))


def test_pods_that_have_it_keep_it_while_drain_wait_waits(offered: Site) -> None:
    """The pods' containers may restart, and then need the GPU's name in the CDI specification."""
    agent = offered.configure(allocation="dra", on_detach="drain-wait", drain_wait=0)
    directory = offered.hold()
    ending = detach(SECOND, agent, AT_ONCE)
    assert "is withheld from new pods, but is still in use after 0 s" in ending.sentences[0]
    assert (state(offered), offered.granted()) == (TAINTED, (FIRST, SECOND))
    agent.reconcile()
    assert state(offered) == TAINTED
    offered.meanwhile = [lambda: None, lambda: shutil.rmtree(directory)]
    assert detach(SECOND, offered.configure(allocation="dra", on_detach="drain-wait"), AT_ONCE).done
    assert (state(offered), offered.granted(), offered.permitted()) == (TAINTED, (FIRST,), False)


def test_force_evicts_first(offered: Site) -> None:
    directory = offered.hold()
    seen: list[object] = []
    offered.meanwhile = [lambda: seen.append((state(offered), offered.granted())), lambda: shutil.rmtree(directory)]
    timing = Timing(poll=0, answer=20, taint=0, eviction=20)
    assert detach(SECOND, offered.configure(allocation="dra", on_detach="force"), timing).done
    assert seen == [(EVICTED, (FIRST, SECOND))]
    assert (state(offered), offered.granted()) == (EVICTED, (FIRST,))


def test_force_withdraws_it_from_a_pod_that_stays(offered: Site) -> None:
    offered.hold()
    ending = detach(SECOND, offered.configure(allocation="dra", on_detach="force"), AT_ONCE)
    assert "is no longer granted to any machine, but is still in use" in ending.sentences[0]
    assert (state(offered), offered.permitted()) == (EVICTED, False)


@pytest.mark.parametrize(("policy", "left"), [("refuse", False), ("drain-wait", True)])
def test_an_interruption_while_it_is_only_tainted(offered: Site, policy: str, left: bool) -> None:
    offered.meanwhile = [raising(Interrupted())]
    agent = offered.configure(allocation="dra", on_detach=policy)
    with pytest.raises(Interrupted):
        detach(SECOND, agent, AT_ONCE)
    assert (SECOND in observe_gpus(offered.host).tainted) is left
    assert ("is still detached" in offered.messages[-1]) is left
    agent.reconcile()
    assert state(offered) == (TAINTED if left else HEALTHY)
