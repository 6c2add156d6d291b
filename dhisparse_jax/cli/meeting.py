"""Processes meet before JAX does: who is missing, or there twice, is said in one line by each.

JAX ends a process, with the trace of a compiled library, if the others do not come, or one of them
goes. So process 0 listens first where its coordinator will, and every process, itself among them,
tells it its number and how many there are. It answers all of them alike: that they may go on, or
why they cannot. Their connections stay: one that closes before `Company.part` is a process that
ended, which those at the other ends of its connections say, and end too.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import NoReturn

from dhisparse_jax.errors import UserError

COMPLETE = "complete"
"""What process 0 answers if everybody is there."""

STARTING_SECONDS = 120
"""How long a process waits for the others."""

RETRY_SECONDS = 0.2
ANSWER_SECONDS = 5
"""How much longer the others wait for the answer than process 0 for them."""

_MOST_HEARD = 64
_WHO = re.compile(r"\d{1,9}/\d{1,9}")

GRACE_SECONDS = 5
"""How long a process may take to end by itself when another one has."""

NOTICING_SECONDS = 2
"""How long after an error another process may be the reason of it."""

PARTING = b"parting"
"""What a process says that is done."""

BAD_INPUT = 2
"""The exit code where another process ended."""

Heard = dict[socket.socket, str]
"""Connections, and the number of the process and of all that came over each, as 0/2."""


class Alone(BaseException):
    """This process ends before the others are done, which it has left alone.

    Attributes:
        reason: what ends it.
    """

    def __init__(self, reason: BaseException) -> None:
        super().__init__(reason)
        self.reason = reason


class Company:
    """The other processes that this one has connections to: those of process 0, or it.

    Args:
        others: connections by the number of a process and of all, as 1/2.
    """

    def __init__(self, others: Mapping[str, socket.socket]) -> None:
        self._others = others
        self._gone, self._parted = threading.Event(), threading.Event()
        self._is_first = not any(name.startswith("0/") for name in others)
        self.lost = ""
        self._watchers = [
            threading.Thread(target=self._watch, args=pair, daemon=True) for pair in others.items()
        ]
        for connection in others.values():
            _keep_alive(connection)
        for watcher in self._watchers:
            watcher.start()

    def wait(self, seconds: float) -> str:
        """What to say if another process ends in so many seconds, or has; else nothing."""
        self._gone.wait(seconds)
        return self.lost

    def part(self) -> None:
        """This process is done: the others need not wonder where it is."""
        self._parted.set()
        for connection in self._others.values():
            with contextlib.suppress(OSError):
                connection.sendall(PARTING)
                connection.close()

    def abandon(self) -> None:
        """This process ends before the others are done, who are told by it.

        Process 0 waits for them: JAX aborts those that are there when its coordinator goes.
        """
        self._parted.set()
        for connection in self._others.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + GRACE_SECONDS + NOTICING_SECONDS
        for watcher in self._watchers if self._is_first else ():
            watcher.join(max(0.0, deadline - time.monotonic()))
        for connection in self._others.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # which ends its watcher
            connection.close()

    def _watch(self, name: str, connection: socket.socket) -> None:
        """Wait for the end of another process; this one ends soon after it, whatever it does."""
        said = b""
        with contextlib.suppress(OSError):
            connection.settimeout(None)
            said = connection.recv(len(PARTING))
        if said == PARTING or self._parted.is_set():
            return
        self.lost = f"process {name} ended before the others were done; see what it said"
        self._gone.set()
        if not self._parted.wait(GRACE_SECONDS):
            sys.stderr.write(f"error: {self.lost}\n")
            sys.stderr.flush()
            os._exit(BAD_INPUT)  # the main thread waits in a compiled library, for ever


def _keep_alive(connection: socket.socket) -> None:
    """Notice within 40 seconds that the machine at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def together(address: str | None, process: str | None) -> Generator[None, None, None]:
    """Meet the other processes, if there are any, and say if one of them ends in the body.

    Args:
        address: host and port of process 0.
        process: number of this process and of all, as in 0/2; None: there is no other.

    Raises:
        UserError: they do not come.
        Alone: the body raised something, or one of them ended; they are left alone.
    """
    if process is None:
        yield
        return
    company = meet(str(address), process, STARTING_SECONDS)
    try:
        yield
    except BaseException as error:
        reason: BaseException = error
        # A library that waits for another process may say first that something is wrong.
        if isinstance(error, Exception) and not isinstance(error, UserError):
            lost = company.wait(NOTICING_SECONDS)
            reason = UserError(lost) if lost else error
        company.abandon()
        raise Alone(reason) from error
    company.part()


def leave(code: int) -> NoReturn:
    """End here and now, as JAX would wait for the processes that were left alone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def meet(address: str, process: str, seconds: float) -> Company:
    """Wait until all processes are there.

    Args:
        address: host and port of process 0.
        process: number of this process and of all, as in 0/2.
        seconds: how long to wait for the others.

    Raises:
        UserError: they do not come, or are not those that they should be.
    """
    host, _, port = address.rpartition(":")
    where = host.strip("[]"), int(port)
    deadline = time.monotonic() + seconds
    heard: Heard = {}
    answering = None
    if process.startswith("0/"):
        count = int(process.partition("/")[2])
        server = _listening(address, where[1])
        answering = threading.Thread(
            target=_answer, args=(server, count, deadline, heard), daemon=True
        )
        answering.start()
    connection, answer = _ask(where, address, process, deadline)
    if answering is not None:
        answering.join()  # the port is free for the coordinator then
        connection.close()
    else:
        heard[connection] = f"0/{process.partition('/')[2]}"
    for other, name in heard.items():
        if answer != COMPLETE or name == process:
            other.close()
    if answer != COMPLETE:
        raise UserError(f"process {process} at {address}: {answer}")
    return Company({name: other for other, name in heard.items() if name != process})


def _listening(address: str, port: int) -> socket.socket:
    """A server at a port of this machine. Raises UserError where it is in use."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at {address}: {error.strerror}; is another one there? Give "
            "all processes another port"
        ) from error


def _ask(
    where: tuple[str, int], address: str, process: str, deadline: float
) -> tuple[socket.socket, str]:
    """Tell process 0 who this is. Returns the connection to it, and its answer."""
    why = "nobody listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as closing:
                connection = closing.enter_context(socket.create_connection(where, timeout=left))
                connection.sendall(f"{process}\n".encode())
                connection.settimeout(left + ANSWER_SECONDS)
                with connection.makefile("r", encoding="utf-8", errors="replace") as file:
                    if answer := file.readline().strip():
                        closing.pop_all()
                        return connection, answer
            why = "who listens there is no process 0 that waits"
        except socket.gaierror as error:
            raise UserError(f"process {process} at {address}: {error.strerror}") from error
        except OSError as error:
            why = f"nobody answers there: {error.strerror or error}"
        time.sleep(RETRY_SECONDS)
    raise UserError(f"process {process} at {address}: {why}; start process 0, which is to be there")


def _answer(server: socket.socket, count: int, deadline: float, heard: Heard) -> None:
    """Listen until all are there, or cannot come, and tell all of them which it is."""
    answer = None
    with server:
        while answer is None and (left := deadline - time.monotonic()) > 0:
            if come := _next(server, left):
                heard |= come
                answer = _verdict([*heard.values()], count)
    if answer is None:
        numbers = {who.partition("/")[0] for who in heard.values()}
        missing = [str(number) for number in range(count) if str(number) not in numbers]
        answer = f"of {count} processes {', '.join(missing)} did not come; start all of them"
    for connection in heard:
        with contextlib.suppress(OSError):
            connection.sendall(f"{answer}\n".encode())


def _next(server: socket.socket, seconds: float) -> Heard:
    """Who comes next, unless nobody does, or it is a stranger, who says nothing of this."""
    server.settimeout(seconds)
    with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
        connection = closing.enter_context(server.accept()[0])
        connection.settimeout(min(seconds, ANSWER_SECONDS))
        with connection.makefile("r", encoding="utf-8", errors="replace") as file:
            who = file.readline(_MOST_HEARD).strip()
        if _WHO.fullmatch(who):
            closing.pop_all()  # it stays open, for the answer
            return {connection: who}
    return {}


def _verdict(heard: Sequence[str], count: int) -> str | None:
    """What to answer to those that were heard; None: to wait for the others."""
    for who in heard:
        if int(who.partition("/")[2]) != count:
            return f"one says that it is {who}, process 0 that there are {count}; give all the same"
        if heard.count(who) > 1:
            return f"several say that they are {who}; give each a number of its own"
    return COMPLETE if len(heard) == count else None
