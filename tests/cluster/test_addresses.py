# SPDX-License-Identifier: Apache-2.0
"""Process 0 listens only on the address that the others use, if this address can be found."""

import socket

import pytest

from cluster import addresses
from tests.groups import free_ports


def outward() -> str:
    """The address of this machine in a network; where there is none, of the loopback network but not localhost."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.2"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", outward()])
def test_an_address_of_this_machine_is_the_one_that_is_listened_on(host):
    address, port = addresses.own_address(host), free_ports()
    assert address == socket.gethostbyname(host)
    with addresses.listen(address, port), socket.create_connection((host, port), 5):
        other = "127.0.0.1" if address != "127.0.0.1" else "127.0.0.3"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), 5)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_and_a_name_of_none_are_not_known(host):
    assert addresses.own_address(host) is None


def test_a_name_that_only_here_stands_for_the_loopback_is_no_address_for_others(monkeypatch):
    """As on Debian, whose /etc/hosts has 127.0.1.1 for the name of the machine."""
    places = [("127.0.1.1", 0)]

    def resolve(host, port, **unused):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert addresses.own_address("my-machine") is None
    places.append((outward(), 0))
    assert addresses.own_address("my-machine") == (None if outward() == "127.0.0.2" else outward())


def test_where_no_address_is_known_all_are_listened_on():
    port = free_ports()
    with addresses.listen(None, port):
        for host in ("127.0.0.1", "127.0.0.2"):
            socket.create_connection((host, port), 5).close()
