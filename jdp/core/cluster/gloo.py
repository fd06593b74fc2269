"""The address at which CPU collectives of several hosts listen: one that the other hosts reach.

Gloo, which carries them, uses the address of the host's own name. In Debian's and Ubuntu's /etc/hosts that is
127.0.1.1, which no other host reaches, and no option of JAX changes it. So the address from which this host reaches the
coordinator is used instead.
"""

import contextlib
import functools
import ipaddress
import socket
from typing import Any

import jax
from jax._src import xla_bridge  # JAX's own maker of the CPU backend takes collectives; nothing public hands them on
from jax._src.distributed import global_state
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
from jax.extend import backend

from jdp.core.cluster.coordinator_address import host_of, is_loopback

_SOME_OTHER_HOST = "192.0.2.1"  # of no network (RFC 5737): nothing is sent, the kernel only looks up its route


def listen_where_others_reach(coordinator: str) -> None:
    """Choose the address of CPU collectives if other hosts do not reach that of this host's name.

    Call it after joining, and before anything asks for devices.
    """
    if is_loopback(coordinator) or jax.config.values["jax_cpu_collectives_implementation"] != "gloo":
        return
    own_name = _addresses(socket.gethostname())
    if own_name and not own_name[0].is_loopback:
        return
    ways = (_address_towards(host) for host in (host_of(coordinator), _SOME_OTHER_HOST))
    if address := next(filter(None, ways), None):
        maker = functools.partial(_cpu_client, address)
        backend.register_backend_factory("cpu", maker, priority=0, fail_quietly=False)


def _cpu_client(address: str) -> Any:
    """Return the CPU backend, whose collectives listen at `address`."""
    gloo = _jax.make_gloo_tcp_collectives(distributed_client=global_state.client, hostname=address)
    return xla_bridge.make_cpu_client(gloo)


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of a name; none if it is unknown."""
    with contextlib.suppress(socket.gaierror, UnicodeError):
        return [ipaddress.ip_address(found[4][0]) for found in socket.getaddrinfo(name, None)]
    return []


def _address_towards(host: str) -> str | None:
    """Return the address from which this host sends to another; None for loopback, or without a route."""
    for there in _addresses(host):
        family = socket.AF_INET6 if there.version == 6 else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(there), 9))
            own: str = probe.getsockname()[0]
            if not ipaddress.ip_address(own).is_loopback:
                return own
    return None
