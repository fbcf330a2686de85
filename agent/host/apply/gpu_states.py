"""Publishes the states of GPUs to the machines that offer their GPUs by Dynamic Resource Allocation."""

from collections.abc import Collection, Mapping

from agent.host.apply.driver_roots import make_way
from agent.model.errors import reason
from agent.model.faults import in_words
from agent.model.gpu_states import SIZE_LIMIT, GpuStatus, render_gpu_states
from agent.model.paths import MACHINES_STATE, gpu_states_file, handoff_directory
from agent.system.files import System


def publish_gpu_states(
    system: System, states: Mapping[str, tuple[GpuStatus, ...]], unchanged: Collection[str]
) -> tuple[str, ...]:
    """Write the states for each machine in `states`, and remove those of any other machine that is not in `unchanged`.

    Return failures, one sentence each. The document does not contain the time of the pass, so it is written, and wakes
    the machine's unbounded-agent-dra.service, only if its content has changed.
    """
    failures = []
    try:
        with_state = system.entries(MACHINES_STATE)
    except OSError:
        # publish_host_status reports this failure.
        with_state = ()
    for name in sorted({*with_state, *states} - set(unchanged)):
        path = gpu_states_file(name)
        try:
            # A machine that never had a goal has no such directory.
            if system.is_directory(handoff_directory(name), follow=False):
                _update(system, path, states.get(name))
        except OSError as error:
            failures.append(f"cannot update {path}: {reason(error, path)}")
        except Exception as error:
            failures.append(f"cannot update {path}: {in_words(error)}")
    return tuple(failures)


def _update(system: System, path: str, states: tuple[GpuStatus, ...] | None) -> None:
    """Write the states if they differ from those in the file; remove the file if `states` is None."""
    if states is None:
        make_way(path, system)
        system.remove(path)
        return
    content = render_gpu_states(states)
    try:
        # A link is not followed: root in the machine can remount the directory writable and put one there.
        before = system.read_untrusted(path, SIZE_LIMIT)[0]
    except OSError:
        before = b""
    if before != content:
        make_way(path, system)
        system.write(path, content)
