# SPDX-License-Identifier: Apache-2.0
"""Finds the address that process 0 listens on: only the one that the other processes use."""

import ipaddress
import socket

from cluster.hub import RunError

THIS_MACHINE = "localhost"


def own_address(host: str) -> str | None:
    """Return the local address that `host` resolves to on other machines too; None if there is none.

    There is none if `host` resolves to the address of another machine, such as a load balancer, or to a loopback
    address that holds only here: Debian's /etc/hosts has 127.0.1.1 for the machine's own name.
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
    """Return a socket that listens on a port of `address`, or of all addresses if None; RunError if that fails."""
    try:
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        why = error.strerror.partition(" (while")[0]  # Python adds this part, which repeats the port
        raise RunError(f"port {port} on this machine: {why}; use another coordinator port") from None
