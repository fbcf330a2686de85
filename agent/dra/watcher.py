"""Watches objects at the API server. It reports only that something has changed: the caller reads the objects again."""

import logging
import math
import random
import threading
import time
from collections.abc import Callable

from agent.dra.api_client import ApiClient
from agent.dra.api_errors import ApiError
from agent.model.errors import AgentError

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 15.0
"""Seconds from the end of one attempt to the next. After each failure, and after each watch that ends before it has
settled, the pause doubles, up to the longest."""
SETTLED = 10.0
"""Seconds after which a watch has settled. Some proxies end each watch at once: then the pause must grow. Other proxies
end a watch only after it has been idle for a while: then the next watch should begin soon."""

LOGGED_FAILURE = 2
"""How many failures in a row cause a log message. A single failure is usual: servers and load balancers end watches."""


class Watcher(threading.Thread):
    """Watches one list of objects until `stop`."""

    def __init__(self, client: ApiClient, path: str, selector: str, changed: Callable[[], None]) -> None:
        """Set what is watched. `selector` is a field selector. The watcher's thread calls `changed` after each change.

        It also calls `changed` each time the watch begins.
        """
        super().__init__(name=f"watch {path}", daemon=True)
        self._client, self._path, self._selector, self._changed = client, path, selector, changed
        self._stopped = threading.Event()
        self._failures = 0
        """Attempts that have failed since the watch last began."""
        self._began = math.inf
        """When the watch of the current attempt began, by time.monotonic(); infinity before it has begun."""

    def run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            self._began, failed = math.inf, False
            try:
                self._watch()
            except AgentError as error:
                failed = True
                self._failures += 1
                if self._failures == LOGGED_FAILURE:
                    log.warning("changes to %s are noticed up to a minute late: %s", self._path, error)
            settled = time.monotonic() - self._began >= SETTLED
            if settled:
                pause = FIRST_PAUSE
            if failed or not settled:
                pause = min(2 * pause, LONGEST_PAUSE)
            # If the API server fails, all nodes lose it at the same moment. They should not all return at the same
            # moment, so the pause is random.
            self._stopped.wait(pause * random.uniform(0.5, 1.0))

    def stop(self) -> None:
        """Make the thread end when the current watch ends."""
        self._stopped.set()

    def _watch(self) -> None:
        """List the objects, and follow later changes until the server ends the watch. Raises AgentError."""
        listed = self._client.get(self._path, fieldSelector=self._selector)
        metadata = listed.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if not isinstance(version, str):
            raise ApiError(f"GET {self._path}", "the list has no resourceVersion")
        for event in self._client.watch(self._path, version, fieldSelector=self._selector):
            # The first event is empty, and says that the server has accepted the watch. It counts as a change, because
            # the objects may have changed between the caller's last reading and the list above.
            if self._failures >= LOGGED_FAILURE:
                log.info("changes to %s are noticed at once again", self._path)
            self._failures = 0
            self._began = min(self._began, time.monotonic())
            # A bookmark is no change: it only has a newer resourceVersion.
            if event.get("type") != "BOOKMARK" and not self._stopped.is_set():
                self._changed()
