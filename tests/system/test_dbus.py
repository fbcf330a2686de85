"""Calls on the system bus, over a real socket to a simulated bus that speaks D-Bus through jeepney."""

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jeepney import DBusAddress, HeaderFields, Message, Parser, new_error, new_method_return, new_signal

from agent.model.errors import BusAnswerError, BusError
from agent.system.bus import DRIVER, NO_OWNER, REPLY_LIMIT, SystemBus

SERVICE, PATH, METHOD = "org.example.Service", "/org/example", "org.example.Interface.Method"
OWNER, STRANGER = ":1.0", ":1.4711"
Answer = Callable[[Message, int], bytes | None]
"""Answers a call, given the connection's number; None closes the connection."""

Connect = Callable[..., SystemBus]


class SimulatedBus:
    """A bus that answers Hello. The test gives the answers to everything else."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path, self.answer = str(path), answer
        self.owner, self.activated = OWNER, ""
        """SERVICE's unique name now, and the one that it gets when the bus starts it."""
        self.connections, self.calls = 0, list[Message]()
        self._open: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Act like a bus that exits: nothing listens, and every connection is closed."""
        for each in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join(5)
        Path(self.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listening.accept()[0]
                self._open.append(client)
                self.connections += 1
                threading.Thread(target=self._serve, args=(client, self.connections), daemon=True).start()

    def _serve(self, client: socket.socket, number: int) -> None:
        parser = Parser()
        with contextlib.suppress(OSError):
            line = b""
            while not line.endswith(b"\r\n"):
                line += client.recv(100)
            client.sendall(b"OK 0123456789abcdef0123456789abcdef\r\n")
            assert client.recv(len(b"BEGIN\r\n")) == b"BEGIN\r\n"
            while data := client.recv(4096):
                for call in parser.feed(data):
                    answer = self._answer(call, number)
                    if answer is None:
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    client.sendall(answer)

    def _answer(self, call: Message, number: int) -> bytes | None:
        match call.header.fields[HeaderFields.member]:
            case "Hello":
                return returned(call, "s", (f":1.{number}",), sender=DRIVER)
            case "GetNameOwner" if self.owner:
                return returned(call, "s", (self.owner,), sender=DRIVER)
            case "GetNameOwner":
                return refused(call, NO_OWNER[0], "no such name", sender=DRIVER)
            case "StartServiceByName":
                self.owner = self.activated
                reply = refused(call, NO_OWNER[1], "nothing starts it", sender=DRIVER)
                return returned(call, "u", (1,), sender=DRIVER) if self.activated else reply
            case _:
                pass
        if call.header.fields[HeaderFields.destination] != self.owner:
            return refused(call, NO_OWNER[1], "it went", sender=DRIVER)
        self.calls.append(call)
        return self.answer(call, number)


def sent(message: Message, sender: str, serial: int = 1) -> bytes:
    """Return a message as the bus delivers it: the bus sets the sender."""
    message.header.fields[HeaderFields.sender] = sender
    data: bytes = message.serialise(serial=serial)
    return data


def returned(call: Message, signature: str, body: tuple[object, ...], sender: str = OWNER) -> bytes:
    return sent(new_method_return(call, signature, body), sender)


def refused(call: Message, name: str, text: str, sender: str = OWNER) -> bytes:
    return sent(new_error(call, name, "s", (text,)), sender)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "bus"


@contextlib.contextmanager
def simulated(place: Path, answer: Answer) -> Iterator[SimulatedBus]:
    bus = SimulatedBus(place, answer)
    try:
        yield bus
    finally:
        bus.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A function that makes connections, which are closed at the end."""
    made: list[SystemBus] = []

    def new(place: Path) -> SystemBus:
        made.append(SystemBus(str(place)))
        return made[-1]

    yield new
    for each in made:
        each.close()


def call(bus: SystemBus, *arguments: str, deadline: float = 5.0) -> tuple[object, ...]:
    return bus(SERVICE, PATH, METHOD, "s" * len(arguments), arguments, deadline)


def test_a_call_and_its_answer(place: Path, connect: Connect) -> None:
    with simulated(place, lambda message, _: returned(message, "v", (("a(ss)", [("a", "b")]),))) as simulation:
        bus = connect(place)
        assert call(bus, "one", "two") == (("a(ss)", [("a", "b")]),)
        assert call(bus)
        assert simulation.connections == 1
        first = simulation.calls[0].header.fields
        assert (first[HeaderFields.path], first[HeaderFields.destination]) == (PATH, OWNER)
        assert f"{first[HeaderFields.interface]}.{first[HeaderFields.member]}" == METHOD
        assert simulation.calls[0].body == ("one", "two")


def test_an_error_names_the_call(place: Path, connect: Connect) -> None:
    with simulated(place, lambda message, _: refused(message, "org.example.NoSuchThing", "not here")) as simulation:
        bus = connect(place)
        with pytest.raises(BusAnswerError, match=r"Method of org\.example\.Service .*one.*NoSuchThing: not here"):
            call(bus, "one")
        with pytest.raises(BusAnswerError):
            call(bus)
        assert simulation.connections == 1, "an error is an answer"


def foreign_signal(body: str, sender: str = STRANGER, kind: str = "s", answers: Message | None = None) -> bytes:
    """Return a signal, which on the system bus every user may send to anybody; `answers`: that looks like a reply."""
    value = (0,) if kind == "u" else (body,)
    signal = new_signal(DBusAddress("/", interface="org.example.Noise"), "Made", kind, value)
    if answers:
        signal.header.fields[HeaderFields.reply_serial] = answers.header.serial
    return sent(signal, sender, serial=7)


def late(call: Message) -> bytes:
    """Return an answer to an earlier call."""
    other = new_method_return(call, "s", ("other",))
    other.header.fields[HeaderFields.reply_serial] = 4711
    return sent(other, OWNER)


# The bus delivers a number of a file descriptor that was not sent (seen with dbus-daemon 1.14).
UNREADABLE = foreign_signal("", kind="u").replace(b"\x01u\x00", b"\x01h\x00") * 2_000


@pytest.mark.parametrize(
    "noise",
    [
        late,
        # With dbus-broker, every user may send anything to anybody, with any serial.
        lambda call: refused(call, "org.freedesktop.DBus.Error.AccessDenied", "forged", STRANGER),
        lambda call: returned(call, "s", ("forged",), STRANGER),
        lambda call: foreign_signal("forged", answers=call),
        # Another process may have chosen the content of a service's own signal.
        lambda call: foreign_signal("signal", OWNER, answers=call),
        lambda _: UNREADABLE,
        # More than the limit of one message, together.
        lambda _: foreign_signal("x" * (REPLY_LIMIT // 2)) * 5,
    ],
    ids=["late", "forged error", "forged return", "forged signal", "own signal", "unreadable", "many"],
)
def test_attack_what_is_not_the_owners_answer_is_skipped(
    place: Path, connect: Connect, noise: Callable[[Message], bytes]
) -> None:
    with simulated(place, lambda call, _: noise(call) + returned(call, "s", ("own",))) as simulation:
        assert call(connect(place), deadline=30) == ("own",)
        assert simulation.connections == 1


def test_a_service_is_started_by_the_bus_and_called_by_its_new_name(place: Path, connect: Connect) -> None:
    """systemd-machined exits when it is idle."""
    with simulated(place, lambda message, _: returned(message, "s", (bus.owner,), bus.owner)) as bus:
        client = connect(place)
        bus.owner, bus.activated = "", ":1.9"
        assert call(client) == (":1.9",)
        bus.owner = ":1.7"
        assert call(client) == (":1.7",), "it was started again"
        bus.owner, bus.activated = "", ""
        with pytest.raises(BusAnswerError, match="ServiceUnknown: nothing starts it"):
            call(client)
        assert bus.connections == 1


def test_a_bus_may_start_later_and_again(place: Path, connect: Connect) -> None:
    bus = connect(place)
    for _ in range(2):
        with pytest.raises(BusError, match=r"No such file or directory.*dbus\.socket"):
            call(bus)
    for _ in range(2):
        with simulated(place, lambda message, _: returned(message, "s", ("back",))):
            assert call(bus) == ("back",)


def test_a_bus_that_ends_in_the_middle_of_a_read(place: Path, connect: Connect) -> None:
    """The call fails if its second attempt does; the next call works."""
    with simulated(place, lambda message, number: None if number < 3 else returned(message, "s", ("third",))):
        client = connect(place)
        with pytest.raises(BusError, match="Connection reset"):
            call(client)
        with pytest.raises(BusError, match="Connection reset"):
            call(client)
        assert call(client) == ("third",)


def test_a_late_answer_is_not_taken_for_the_next_one(place: Path, connect: Connect) -> None:
    with simulated(
        place, lambda message, number: b"" if number == 1 else returned(message, "s", ("new",))
    ) as simulation:
        bus = connect(place)
        started = time.monotonic()
        with pytest.raises(BusError, match="timed out") as raised:
            call(bus, deadline=0.3)
        assert isinstance(raised.value.__cause__, TimeoutError), "by which callers know that nothing answers"
        assert time.monotonic() - started >= 0.3
        assert call(bus) == ("new",)
        assert simulation.connections == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.0 400 Bad Request\r\n\r\n" * 4, "."),
        (b"l\x02\x00\x01" + b"\xff" * 60, "."),
        (foreign_signal("x" * (2 * REPLY_LIMIT)), "a message of more than 1 MiB"),
    ],
    ids=["text", "huge", "large"],
)
def test_invalid_data_is_an_error(place: Path, connect: Connect, answer: bytes, why: str) -> None:
    with simulated(place, lambda *_: answer), pytest.raises(BusError, match=why):
        call(connect(place), deadline=0.5)


def test_a_connection_that_somebody_has_filled_is_replaced(place: Path, connect: Connect) -> None:
    flood = foreign_signal("x" * (2 * REPLY_LIMIT))

    def answer(message: Message, number: int) -> bytes:
        filled = number == 1 and len(simulation.calls) > 1
        return (flood if filled else b"") + returned(message, "s", (f"by connection {number}",))

    with simulated(place, answer) as simulation:
        bus = connect(place)
        assert call(bus) == ("by connection 1",)
        assert call(bus) == ("by connection 2",)


def test_a_socket_that_nobody_serves_ends_at_the_deadline(place: Path, connect: Connect) -> None:
    """dbus.socket listens before dbus.service runs."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
        listening.listen()
        with pytest.raises(BusError, match="authenticate"):
            call(connect(place), deadline=0.3)
