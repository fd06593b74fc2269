"""Two hosts with addresses and names of their own, on this machine: network namespaces that a virtual cable joins.

Each has an interface `cable` with its address of ADDRESSES, and a loopback of its own; nothing else is reachable from
them. Each knows both names. The cable is cut by taking one end down, which loses packets without a word to either side,
as a pulled one does.
"""

import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from functools import partial

NAMES = ("h0", "h1")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # TEST-NET-1: nobody's
TAG = f"jdp{os.getpid() % 100000}"


def missing():
    """Why there can be no such hosts here; None if there can."""
    absent = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if os.geteuid() != 0 or absent:
        return f"two hosts on one machine need root and iproute2 (no {absent[0] if absent else 'root'})"
    tried = subprocess.run(["ip", "netns", "add", f"{TAG}try"], capture_output=True, text=True, timeout=20)
    if tried.returncode != 0:
        return f"this machine has no network namespaces: {tried.stderr.strip()}"
    ip("netns", "delete", f"{TAG}try")
    return None


def ip(*words):
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True)


def namespace(number):
    return f"{TAG}h{number}"


def on(folder, number, command):
    """The command line that runs a command on a host. Its /etc/hosts is in `folder`."""
    script = f'hostname {NAMES[number]} && mount --bind {folder}/hosts{number} /etc/hosts && exec "$@"'
    own_names = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
    return ["ip", "netns", "exec", namespace(number), *own_names, *command]


@contextmanager
def two_hosts(folder):
    """The hosts, joined; yields a function `on(number, command)` that returns the command line to run there."""
    for number in range(2):
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, NAMES, strict=True))]
        (folder / f"hosts{number}").write_text("\n".join(lines) + "\n")
    try:
        for number in range(2):
            ip("netns", "add", namespace(number))
            ip("-n", namespace(number), "link", "set", "lo", "up")
        ends = [("cable", "netns", namespace(0)), ("peer", "name", "cable", "netns", namespace(1))]
        ip("link", "add", *ends[0], "type", "veth", *ends[1])
        for number, address in enumerate(ADDRESSES):
            ip("-n", namespace(number), "address", "add", f"{address}/24", "dev", "cable")
        join()
        yield partial(on, folder)
    finally:
        for number in range(2):  # the cable goes with them
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", namespace(number))


def cut():
    ip("-n", namespace(1), "link", "set", "cable", "down")


def join():
    for number in range(2):
        ip("-n", namespace(number), "link", "set", "cable", "up")
