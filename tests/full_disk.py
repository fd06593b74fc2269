"""A disk that is full, for the tests of what writes to one."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size):
    """The system refuses to let any file grow beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
