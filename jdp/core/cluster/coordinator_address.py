"""The coordinator's address: wait until it can be used, and listen on no more interfaces than needed.

The coordinator is a service of process 0 at which the others register. Without mutual TLS (`tls`) anyone who reaches
its port can end the job. So if its address is a number of this host, it listens on that one alone: loopback on a single
machine, the private network's address on several. A name may stand for another address on other hosts; then it listens
as JAX does, on all interfaces or on JAX_COORDINATOR_BIND_ADDRESS.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import sys
import time

import jax

from jdp.base.machine import listen

PORT_SECONDS = 30.0  # how long process 0 waits for its port: that of a job that ends may be taken a moment longer
QUIET_SECONDS = 5.0  # a wait that takes longer is reported
_POLL_SECONDS = 0.5
_NO_PROXY = "no_grpc_proxy"  # gRPC reads this name, in lower case


def is_loopback(address: str) -> bool:
    """Return True if "HOST:PORT" can be reached from this machine alone."""
    host = host_of(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def bind_address(address: str) -> str | None:
    """Return the "HOST:PORT" on which the coordinator listens; None for JAX's default."""
    if is_loopback(address):
        return address
    return None if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ or not _is_own_number(host_of(address)) else address


def listening_host(address: str) -> str:
    """Return the host on which the coordinator of an address listens, here or by JAX's default; "" for all."""
    bound = bind_address(address) or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or "[::]:0"
    return "" if host_of(bound) == "::" else host_of(bound)


def bypass_proxies(address: str) -> None:
    """Make gRPC reach the coordinator directly: through a cluster's http_proxy it would time out."""
    others = [name for name in os.environ.get(_NO_PROXY, "").split(",") if name]
    os.environ[_NO_PROXY] = ",".join([*others, host_of(address)])
    jax.config.update("jax_check_proxy_envs", False)


def wait_for_name(address: str, seconds: float) -> None:
    """Wait until the coordinator's name has an address: a pod's has none before its container is made."""
    host, start, said = host_of(address), time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (socket.gaierror, UnicodeError) as unknown:
            waited, reason = time.monotonic() - start, unknown
        if waited >= seconds:
            raise RuntimeError(
                f"the name of process 0's host, {host!r}, has had no address for {seconds:g} seconds ({reason}): fix "
                "the name, or give it an address in DNS or /etc/hosts"
            )
        if waited >= QUIET_SECONDS and not said:
            print(f"jdp: waiting up to {seconds:g} seconds for an address of {host!r} ({reason})", file=sys.stderr)
            said = True
        time.sleep(_POLL_SECONDS)


def wait_for_port(address: str) -> None:
    """Wait, in process 0, until nobody else listens on the coordinator's port.

    gRPC would share the port with another job of this user (SO_REUSEPORT), and each would get some of the other's
    processes.
    """
    port = int(address.rpartition(":")[2])
    deadline = time.monotonic() + PORT_SECONDS
    while _is_taken(listening_host(address), port):
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"port {port}, of the coordinator, has been taken on this host for {PORT_SECONDS:g} seconds: end what "
                "listens there, or give all processes of this job another, by JAX_COORDINATOR_PORT (JDP_COORDINATOR)"
            )
        time.sleep(_POLL_SECONDS)


def host_of(address: str) -> str:
    """Return the host of "HOST:PORT", without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def _is_own_number(host: str) -> bool:
    """Return True if the host is a number, not a name, and an address of this machine."""
    with contextlib.suppress(ValueError, OSError):
        version = ipaddress.ip_address(host).version
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return True
    return False


def _is_taken(host: str, port: int) -> bool:
    """Return True if another process listens on this port of this host ("" for any address)."""
    try:
        listen(host, port).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
