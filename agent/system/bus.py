"""The host half's backend of `agent.system.process.Bus`, which uses the jeepney package."""

import errno
import os
import socket
import time
from itertools import count
from typing import Any

from jeepney import DBusAddress, HeaderFields, Message, MessageType, Parser, new_method_call
from jeepney.bus_messages import message_bus
from jeepney.io.blocking import prep_socket

from agent.model.errors import BusAnswerError, BusError

SOCKET = "/run/dbus/system_bus_socket"
"""The path in the D-Bus specification ("System message bus"), with /run for /var/run. DBUS_SYSTEM_BUS_ADDRESS in the
environment is ignored."""
REPLY_LIMIT = 1 << 20
"""Bytes of the largest message that is accepted. The bus's own limit is 128 MiB."""
CHUNK = 1 << 16
HINT = "see `systemctl status dbus.socket dbus.service`"
DRIVER = "org.freedesktop.DBus"
"""The bus's own name. The bus sets the sender of each message (D-Bus specification, "Message Bus Message Routing")."""
NO_OWNER = (f"{DRIVER}.Error.NameHasNoOwner", f"{DRIVER}.Error.ServiceUnknown")
ANSWERS = (MessageType.method_return, MessageType.error)


class _TooLargeError(OSError):
    """A message exceeds REPLY_LIMIT."""


class SystemBus:
    """A Bus that keeps its connection between calls, and connects again after the connection broke. Not thread-safe.

    With dbus-broker, any user of the host may send replies, and signals that look like replies. So a call goes to the
    unique name of a service's owner, which no other connection ever gets, and only a reply from that name is accepted.
    """

    def __init__(self, path: str = SOCKET) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._parser, self._serials = Parser(), count(1)
        self._owners: dict[str, str] = {}
        """The unique name of each service's owner, by the service's name."""

    def __call__(
        self, service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        interface, _, member = method.rpartition(".")
        call = new_method_call(DBusAddress(path, service, interface), member, signature or None, arguments)
        try:
            reply = self._reply(service, call, time.monotonic() + timeout)
        except OSError as error:
            raise BusError(f"{method} of {service} on {self._path}: {error.strerror or error}", HINT) from error
        if reply.header.message_type is not MessageType.method_return:
            name = _error_name(reply) or "unnamed error"
            text = reply.body[0] if reply.body and isinstance(reply.body[0], str) else ""
            raise BusAnswerError(f"{method} of {service} for {arguments or path}: {name}: {text[:500]}")
        return tuple(reply.body)

    def close(self) -> None:
        """Disconnect. The next call connects again."""
        if self._socket:
            self._socket.close()
        self._socket = None

    def _reply(self, service: str, call: Message, deadline: float) -> Message:
        was_connected = self._socket is not None
        try:
            if not was_connected:
                self._connect(deadline)
            return self._exchange(service, call, deadline)
        except BaseException as error:
            # Disconnect. Otherwise, the next call could receive the late reply to this call, or the rest of that reply.
            self.close()
            # The bus has restarted since the last call, or a process has flooded this connection: any user of the host
            # may send signals to any connection. Try again with a new connection.
            if was_connected and isinstance(error, (ConnectionError, _TooLargeError)):
                return self._reply(service, call, deadline)
            raise

    def _connect(self, deadline: float) -> None:
        try:
            self._socket = prep_socket(self._path, timeout=_seconds_until(deadline))
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EPROTO, f"not authenticated: {error}") from error
        self._parser, self._serials, self._owners = Parser(), count(1), {}
        self._send(message_bus.Hello(), DRIVER, deadline)

    def _exchange(self, service: str, call: Message, deadline: float) -> Message:
        """Return the reply from the service's owner, or the bus's error. If it has no owner yet, start the service."""
        owner_was_known = service in self._owners
        while True:
            if service not in self._owners:
                reply = self._send(message_bus.GetNameOwner(service), DRIVER, deadline)
                if _unreachable(reply):
                    reply = self._send(message_bus.StartServiceByName(service), DRIVER, deadline)
                    if not _error_name(reply):
                        reply = self._send(message_bus.GetNameOwner(service), DRIVER, deadline)
                if _error_name(reply):
                    return reply
                self._owners[service] = str(reply.body[0])
            call.header.fields[HeaderFields.destination] = self._owners[service]
            reply = self._send(call, self._owners[service], deadline)
            if not owner_was_known or not _unreachable(reply):
                return reply
            # The recorded owner has left the bus, so nothing received the call. The name may have a new owner.
            del self._owners[service]
            owner_was_known = False

    def _send(self, call: Message, sender: str, deadline: float) -> Message:
        """Send the call, and return the reply from `sender` or the bus's error. Other messages are dropped.

        Raises OSError, including when the data received is not D-Bus.
        """
        assert self._socket
        # `received` counts the bytes since the last complete message, not those of the whole call: anybody may send any
        # number of signals before the reply comes.
        serial, received = next(self._serials), 0
        self._socket.settimeout(_seconds_until(deadline))
        self._socket.sendall(call.serialise(serial=serial))
        while True:
            try:
                message: Any = self._parser.get_next_message()
            except Exception as error:
                # jeepney raises any exception that a malformed message causes.
                if self._parser.next_msg_size is None:
                    raise OSError(errno.EBADMSG, f"not a D-Bus message: {error!r}"[:200]) from error
                # A value that jeepney cannot read, such as one of type UNIX_FD; any user of the host can send it. The
                # whole message has left jeepney's buffer, so the next one can be read.
                self._parser.next_msg_size = None
                received = 0
                continue
            if message is None:
                self._socket.settimeout(_seconds_until(deadline))
                data = self._socket.recv(CHUNK)
                received += len(data)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                if received > REPLY_LIMIT:
                    raise _TooLargeError(errno.EMSGSIZE, f"a message of more than {REPLY_LIMIT >> 20} MiB")
                self._parser.add_data(data)
            elif _is_reply(message, serial, sender):
                return message
            else:
                received = 0


def _error_name(message: Message) -> str:
    return str(message.header.fields.get(HeaderFields.error_name, ""))


def _unreachable(message: Message) -> bool:
    """Return whether the bus itself says that the name has no owner."""
    return _error_name(message) in NO_OWNER and message.header.fields.get(HeaderFields.sender) == DRIVER


def _is_reply(message: Message, serial: int, sender: str) -> bool:
    """Return whether the message is the reply from `sender`, or the bus's error saying that `sender` will not reply."""
    fields = message.header.fields
    if message.header.message_type not in ANSWERS or fields.get(HeaderFields.reply_serial) != serial:
        return False
    from_bus = message.header.message_type is MessageType.error and fields.get(HeaderFields.sender) == DRIVER
    return bool(from_bus or fields.get(HeaderFields.sender) == sender)


def _seconds_until(deadline: float) -> float:
    """Return the remaining seconds. Raises TimeoutError if none remain, because to a socket 0 means "do not block"."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
    return seconds
