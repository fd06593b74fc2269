"""The output of this process on other descriptors, as a shell gives them to a command."""

import os
import sys
from contextlib import contextmanager

import pytest


@contextmanager
def streams(stdout, stderr):
    """Write stdout and stderr of this process, of C++ too, to these descriptors while in `with`; close them."""
    before = [os.dup(number) for number in (1, 2)]
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with pytest.MonkeyPatch.context() as patched:
        for number, name in ((1, "stdout"), (2, "stderr")):
            patched.setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, descriptor in zip((1, 2), before, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
