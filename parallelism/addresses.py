# SPDX-License-Identifier: Apache-2.0
"""Where process 0 listens: on the address that the others use, and on no other."""

import ipaddress
import socket

from parallelism.hub import RunError

THIS_MACHINE = "localhost"


def own_address(host: str) -> str | None:
    """Return the address of this machine that `host` stands for on other machines too; None where none is known.

    That is so where the host is reached through an address that is another machine's, as a load balancer's, and where
    its name is a loopback address here alone: Debian's /etc/hosts has 127.0.1.1 for the machine's own name.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _, _, place in found:
        address = place[0]
        if ipaddress.ip_address(address).is_loopback and host not in (THIS_MACHINE, address):
            continue
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(place)
            except OSError:
                continue
            return address
    return None


def listen(address: str | None, port: int) -> socket.socket:
    """Listen on a port of an address, None: of all; RunError where that cannot be."""
    try:
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        why = error.strerror.partition(" (while")[0]  # which Python adds, and says the port again
        raise RunError(f"port {port} on this machine: {why}; take another coordinator port") from None


def check_free(address: str | None, port: int) -> None:
    """Raise RunError where another program listens on a port of this machine."""
    listen(address, port).close()
