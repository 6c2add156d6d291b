"""Processes that meet, or do not: threads here, since nothing of it needs JAX."""

import socket
import threading
import time

import pytest

from dhisparse_jax.cli.meeting import meet
from dhisparse_jax.errors import UserError


def free_address():
    with socket.create_server(("", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


def said(*processes, seconds=10.0, address=None):
    """What `meet` says to each, in their order; empty where they meet."""
    address, found = address or free_address(), {}

    def one(place, process):
        try:
            company = meet(address, process, seconds)
            found[place] = ""
            company.part()
        except UserError as error:
            found[place] = str(error)

    threads = [threading.Thread(target=one, args=both) for both in enumerate(processes)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # in order
    for thread in threads:
        thread.join(30)
    return [found[place].replace(address, "ADDRESS") for place in range(len(processes))]


@pytest.mark.parametrize("order", [["0/3", "1/3", "2/3"], ["2/3", "1/3", "0/3"], ["0/1"]])
def test_they_meet_whoever_is_first(order):
    assert said(*order) == [""] * len(order)


def test_a_port_is_free_again():
    address = free_address()
    for _ in range(2):
        assert said("0/2", "1/2", address=address) == ["", ""]


def company(count):
    """What `count` processes have of each other."""
    address, found = free_address(), {}
    join = lambda number: found.update({number: meet(address, f"{number}/{count}", 10.0)})
    threads = [threading.Thread(target=join, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[number] for number in range(count)]


def test_one_that_ends_is_named_by_the_others():
    zero, one, two = company(3)
    assert zero.wait(0.0) == ""
    one.abandon()
    assert zero.wait(4.0) == "process 1/3 ended before the others were done; see what it said"
    assert two.wait(0.1) == ""
    ending = threading.Thread(target=zero.abandon)
    ending.start()
    assert two.wait(4.0) == "process 0/3 ended before the others were done; see what it said"
    assert ending.is_alive()  # the first one waits for the others
    two.part()
    ending.join(4.0)
    assert not ending.is_alive()


def test_those_that_are_done_are_not_missed():
    zero, one = company(2)
    one.part()
    assert zero.wait(0.3) == ""
    zero.part()


def test_who_does_not_come_is_named():
    assert said("0/3", "1/3", seconds=0.5) == [
        f"process {number}/3 at ADDRESS: of 3 processes 2 did not come; start all of them"
        for number in range(2)
    ]


def test_nobody_listens():
    (line,) = said("1/2", seconds=0.5)
    assert line.startswith("process 1/2 at ADDRESS: nobody answers there: ")
    assert line.endswith("; start process 0, which is to be there")


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        (["0/3", "1/3", "1/3"], "several say that they are 1/3; give each a number of its own"),
        (
            ["0/2", "1/3"],
            "one says that it is 1/3, process 0 that there are 2; give all the same",
        ),
        (
            ["0/2", "2/3"],
            "one says that it is 2/3, process 0 that there are 2; give all the same",
        ),
    ],
)
def test_numbers_that_do_not_go_together(processes, reason):
    found = said(*processes)
    assert found == [f"process {process} at ADDRESS: {reason}" for process in processes]


def test_two_are_the_first():
    found = said("0/2", "0/2", seconds=1.0)
    assert "process 0 cannot listen at ADDRESS: Address already in use" in found[1]
    assert found[0] == "process 0/2 at ADDRESS: of 2 processes 1 did not come; start all of them"


def test_a_host_that_is_none():
    (line,) = said("1/2", address="no-such-host.invalid:1234")
    assert line.startswith("process 1/2 at ADDRESS: ")


def test_another_program_listens():
    with socket.create_server(("", 0)) as server:
        server.settimeout(5)
        closing = threading.Thread(target=lambda: server.accept()[0].close())
        closing.start()
        (line,) = said("1/2", seconds=0.3, address=f"localhost:{server.getsockname()[1]}")
        closing.join()
    assert line.startswith("process 1/2 at ADDRESS: ")


def test_strangers_are_not_counted():
    address = free_address()
    host, _, port = address.partition(":")
    threads = [threading.Thread(target=lambda: found.extend(said("0/2", address=address)))]
    found = []
    threads[0].start()
    for text in (b"GET / HTTP/1.1\r\n", b"\xff\n", b""):
        for _ in range(100):
            try:
                stranger = socket.create_connection((host, int(port)), timeout=5)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        with stranger:
            stranger.sendall(text)
    assert said("1/2", address=address) == [""]
    threads[0].join(30)
    assert found == [""]
