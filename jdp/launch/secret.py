"""The secret that the machines of a run share, by which the rendezvous and `jdp doctor`'s roll-call know them.

It is in JDP_SECRET, or in a file that JDP_SECRET_FILE names and that its owner alone may read. The variables are
inherited, so the processes of `jdp launch` have it too.
"""

import os
import secrets
import stat
from collections.abc import Mapping

from jdp.base.user_path import user_path

SECRET, SECRET_FILE = "JDP_SECRET", "JDP_SECRET_FILE"
SHORTEST, LONGEST_FILE = 16, 4096
MAKE_ONE = "openssl rand -hex 32"


def shared_secret(environment: Mapping[str, str]) -> bytes | None:
    """Return the secret that an environment gives; None if it has neither variable. No message repeats it."""
    if SECRET in environment and SECRET_FILE in environment:
        raise ValueError(f"A run has one secret; given both {SECRET} and {SECRET_FILE}. Unset one of them.")
    if SECRET in environment:
        return _checked(os.fsencode(environment[SECRET]), SECRET)
    if SECRET_FILE in environment:
        return _checked(_read(environment[SECRET_FILE]), f"the file of {SECRET_FILE}")
    return None


def new_secret() -> str:
    """Return a random secret of 32 bytes, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def _checked(text: bytes, whence: str) -> bytes:
    """Return a secret without the white space around it; check that it is long enough not to be guessed."""
    secret = text.strip()
    if len(secret) < SHORTEST:
        raise ValueError(
            f"A secret has {SHORTEST} or more characters; given {len(secret)} in {whence}. Make one with: {MAKE_ONE}"
        )
    return secret


def _read(given: str) -> bytes:
    """Return the content of a file that nobody but its owner may read."""
    path = user_path(given)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not wait for its writer
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
                raise ValueError(
                    f"{SECRET_FILE} names a file that its owner alone may read; given {path}, with mode "
                    f"{stat.filemode(status.st_mode)}. Fix it with: chmod 600 {path}"
                )
            return file.read(LONGEST_FILE)
    except OSError as error:
        raise ValueError(
            f"{SECRET_FILE} names a file with the secret; given {path}, which cannot be read: {error.strerror}. "
            f"Make it with: (umask 077; {MAKE_ONE} > {path})"
        ) from None
