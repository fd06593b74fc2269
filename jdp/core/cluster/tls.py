"""Mutual TLS of JAX's coordination service, for which JAX 0.12 and later read variables of their own.

An older JAX ignores the variables. A newer one ends a process whose certificates do not fit after five minutes,
without a word of them. So this process' files are checked first, by a handshake with itself.
"""

import inspect
import os
import ssl
from collections.abc import Mapping
from typing import Any

import jax

from jdp.core.cluster.coordinator_address import host_of

CERT, KEY, CA = FILES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
PREFIX, ENFORCED = "JAX_MTLS_PEER_URI_PREFIX", "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS"


class TLSError(ValueError):
    """Settings for mutual TLS that cannot work; the message has the rule, what was given and the fix."""


def check_tls(coordinator: str | None, *, first: bool) -> None:
    """Check JAX's settings for mutual TLS, if there are any: they are complete, JAX knows them, and the files fit.

    `coordinator` is "HOST:PORT" (None: only JAX knows it). The certificate of process 0, `first`, must name that host.
    """
    given = {name: value for name in (*FILES, PREFIX) if (value := _setting(name))}
    if not given and not _setting(ENFORCED):
        return
    asked = next(iter(given), ENFORCED)
    if not jax_has_it():
        raise TLSError(
            f"Mutual TLS of JAX's coordination service needs JAX 0.12 or later; given {asked} with JAX "
            f"{jax.__version__}, which would ignore it. Install a newer JAX, or unset {asked}."
        )
    if missing := [name for name in FILES if name not in given]:
        raise TLSError(f"Mutual TLS needs {', '.join(FILES)}; given {asked} alone. Set {' and '.join(missing)} too.")
    prefix = given.get(PREFIX, "")
    uris = _checked_uris(given, host_of(coordinator) if coordinator and first and not prefix else None)
    if prefix and not (prefix.endswith("/") and any(uri.startswith(prefix) for uri in uris)):
        raise TLSError(
            f"{PREFIX} ends with / and begins a URI of each certificate; given {prefix} with {given[CERT]}, which has "
            f"{', '.join(uris) or 'none'}. Make one with subjectAltName = URI:{prefix.rstrip('/')}/NAME."
        )


def jax_has_it() -> bool:
    """Return True if the installed JAX can protect its coordination service by mutual TLS."""
    return "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters


def _setting(name: str) -> str:
    """Return what JAX's configuration has for a variable, which a program may have set too; "" for nothing."""
    value = getattr(jax.config, name.lower(), os.environ.get(name))
    return "" if str(value).lower() in ("none", "", "0", "false") else str(value)


def _checked_uris(files: Mapping[str, str], host: str | None) -> list[str]:
    """Return the URIs that this process' certificate has, after a handshake with itself that checks its files."""
    for name in FILES:
        try:
            with open(files[name], "rb"):  # noqa: PTH123 - as ssl, which does not say which of them it cannot read
                pass
        except OSError as error:
            raise TLSError(f"{name} names a file; given {files[name]}: {error.strerror}. Fix it.") from None
    try:
        names: Any = _handshake(files, host).get("subjectAltName", ())
    except (ssl.SSLError, ValueError) as error:
        problem = getattr(error, "verify_message", None) or getattr(error, "reason", None) or str(error)
        fix = f"Make one that is signed by {files[CA]}, with its own key, and has not expired."
        if host is not None and "valid for" in problem:
            fix = f"Add {host} to its subjectAltName, or set {PREFIX} to how a URI in each certificate begins."
        found = f"{files[CERT]}: {problem.rstrip('.')}"
        raise TLSError(f"Each process has a certificate that the others can verify; given {found}. {fix}") from None
    return [str(value) for kind, value in names if kind == "URI"]


def _handshake(files: Mapping[str, str], host: str | None) -> Mapping[str, Any]:
    """Let a client and a server with this process' files verify each other; return the certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = (_context(kind, files) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    client.check_hostname = host is not None
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ends[0].getpeercert() or {}


def _context(kind: Any, files: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files[CERT], files[KEY], password=lambda: "")  # an encrypted key must not ask for it
    context.load_verify_locations(files[CA])
    return context
