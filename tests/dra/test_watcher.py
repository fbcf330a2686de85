"""How soon a watch begins again after its end. tests/dra/test_service.py has what it is for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.dra import api as api_module
from agent.dra.api import ApiClient, Watcher
from tests.fakes.api_server import NODES, ApiServer
from tests.fakes.dra_machine import NODE
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.processes


def watches(api: ApiServer) -> int:
    """Return how often a watch was begun."""
    return sum("watch" in query for _, _, query, _ in api.requests)


@contextmanager
def watching(client: ApiClient) -> Iterator[list[float]]:
    """Watch the node, and yield the times of all changes, of which the first list is one."""
    changes: list[float] = []
    thread = Watcher(client, NODES, f"metadata.name={NODE}", lambda: changes.append(time.monotonic()))
    thread.start()
    yield changes
    thread.stop()


def test_a_watch_that_always_ends_at_once_is_begun_ever_less_often(api: ApiServer, client: ApiClient) -> None:
    """As behind a proxy that keeps no connection open."""
    api.watch_seconds = 0.0
    with watching(client) as changes:
        time.sleep(2.5)
        assert 1 <= watches(api) <= 5
        assert len(changes) == 1


def test_a_watch_that_worked_for_a_while_is_begun_again_soon(
    api: ApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a load balancer that cuts what is idle, and at the server, which ends each watch after minutes."""
    monkeypatch.setattr(api_module, "SETTLED", 0.1)
    api.watch_seconds = 0.2
    with watching(client) as changes:
        deadline = time.monotonic() + 5
        while watches(api) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(api.requests) == watches(api) + 1, "only the first one needs a list"
        api.put(f"{NODES}/{NODE}", {"metadata": {"name": NODE, "uid": "2"}})
        wait_for(lambda: len(changes) == 2, 5, "a change is noticed")
