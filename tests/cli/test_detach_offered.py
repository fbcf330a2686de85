"""Detaching a GPU that the node offers itself: new pods are kept from it first, and those that have it are evicted."""

import shutil
from pathlib import Path

import pytest

from agent.host.detach import Ending, Timing, attach, detach
from agent.host.state.gpus import observe_gpus
from agent.model.contract import Effect, GpuState, parse_gpu_states
from agent.model.paths import gpu_states_file
from tests.fakes.clock import Clock
from tests.fakes.detach_site import Interrupted, Site
from tests.fakes.gpu_host import MACHINE

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
FAST = Timing(poll=0, answer=20, taint=0, eviction=0)
HEALTHY = (GpuState.HEALTHY, Effect.NONE)
TAINTED = (GpuState.DRAINING, Effect.NO_SCHEDULE)
EVICTED = (GpuState.DRAINING, Effect.NO_EXECUTE)


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Site:
    site = Site(tmp_path / "host", clock)
    site.configure(allocation="dra")
    site.start()
    return site


def state(site: Site) -> tuple[GpuState, Effect]:
    found = parse_gpu_states(site.host.read(gpu_states_file(MACHINE)))[SECOND]
    return found.state, found.effect


def watched(site: Site, ending: list[Ending], policy: str, steps: int) -> list[tuple[object, tuple[str, ...]]]:
    seen: list[tuple[object, tuple[str, ...]]] = []
    site.meanwhile = [lambda: seen.append((state(site), site.granted()))] * steps
    ending.append(detach(SECOND, site.configure(allocation="dra", on_detach=policy), FAST))
    return seen


def test_it_is_tainted_before_it_is_withdrawn(site: Site) -> None:
    assert state(site) == HEALTHY
    endings: list[Ending] = []
    assert watched(site, endings, "refuse", 2) == [(TAINTED, (FIRST, SECOND)), (TAINTED, (FIRST,))]
    assert endings[0].done
    assert state(site) == TAINTED, "until it has left the bus"
    assert attach(SECOND, site.agent, FAST).done
    assert (state(site), site.granted()) == (HEALTHY, (FIRST, SECOND))


def test_the_next_detachment_does_not_give_it_back(site: Site) -> None:
    """Its taint alone would: tainted GPUs stay granted."""
    endings: list[Ending] = []
    assert detach(SECOND, site.agent, FAST).done
    assert watched(site, endings, "refuse", 1) == [(TAINTED, (FIRST,))]
    assert endings[0].done


def test_refuse_returns_a_gpu_that_a_pod_got_meanwhile(site: Site) -> None:
    """One that a pod has had before is not even tainted."""
    site.meanwhile = [site.hold]
    ending = detach(SECOND, site.agent, FAST)
    assert "was opened in the meantime, and is granted as before" in ending.sentences[0]
    assert (state(site), site.granted()) == (HEALTHY, (FIRST, SECOND))
    assert not detach(SECOND, site.agent, FAST).done
    assert (state(site), site.granted()) == (HEALTHY, (FIRST, SECOND))


def test_pods_that_have_it_keep_it_while_drain_wait_waits(site: Site) -> None:
    """The pods' containers may restart, and then need the GPU's name in the CDI specification."""
    agent = site.configure(allocation="dra", on_detach="drain-wait", drain_wait=0)
    directory = site.hold()
    ending = detach(SECOND, agent, FAST)
    assert "is withheld from new pods, but is still in use after 0 s" in ending.sentences[0]
    assert (state(site), site.granted()) == (TAINTED, (FIRST, SECOND))
    agent.reconcile()
    assert state(site) == TAINTED
    shutil.rmtree(directory)
    assert detach(SECOND, agent, FAST).done
    assert (state(site), site.granted()) == (TAINTED, (FIRST,))


def test_drain_wait_waits_for_the_users_to_exit(site: Site) -> None:
    directory = site.hold()
    site.meanwhile = [lambda: None, lambda: shutil.rmtree(directory)]
    assert detach(SECOND, site.configure(allocation="dra", on_detach="drain-wait"), FAST).done
    assert (state(site), site.permitted()) == (TAINTED, False)


def test_force_evicts_first(site: Site) -> None:
    directory = site.hold()
    seen: list[object] = []
    site.meanwhile = [lambda: seen.append((state(site), site.granted())), lambda: shutil.rmtree(directory)]
    timing = Timing(poll=0, answer=20, taint=0, eviction=20)
    assert detach(SECOND, site.configure(allocation="dra", on_detach="force"), timing).done
    assert seen == [(EVICTED, (FIRST, SECOND))]
    assert (state(site), site.granted()) == (EVICTED, (FIRST,))


def test_force_withdraws_it_from_a_pod_that_stays(site: Site) -> None:
    site.hold()
    ending = detach(SECOND, site.configure(allocation="dra", on_detach="force"), FAST)
    assert "is no longer granted to any machine, but is still in use" in ending.sentences[0]
    assert (state(site), site.permitted()) == (EVICTED, False)


@pytest.mark.parametrize(("policy", "left"), [("refuse", False), ("drain-wait", True)])
def test_an_interruption_while_it_is_only_tainted(site: Site, policy: str, left: bool) -> None:
    def interrupt() -> None:
        raise Interrupted

    site.meanwhile = [interrupt]
    agent = site.configure(allocation="dra", on_detach=policy)
    with pytest.raises(Interrupted):
        detach(SECOND, agent, FAST)
    assert (SECOND in observe_gpus(site.host).tainted) is left
    assert ("is still detached" in site.messages[-1]) is left
    agent.reconcile()
    assert state(site) == (TAINTED if left else HEALTHY)
