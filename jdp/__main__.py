"""The process of `jdp`, and of `python -m jdp`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line and return its exit code; Ctrl-C outside of a run ends the process with one line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # outside of `with`, and while this imports
    import contextlib

    from jdp.base.signals import INTERRUPTED, TRY_AGAIN, Listener

    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # the caller closed it (`>&-`): the next file would get its number
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
    listener, code = Listener({signal.SIGINT: INTERRUPTED}), INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt), listener:
        from jdp.cli.main import main as command

        code = command()
    if listener.by is not None:  # a library may have turned the exception into another
        code = INTERRUPTED
    if code in (INTERRUPTED, TRY_AGAIN):
        os._exit(code)  # Python would wait for XLA's threads, and sometimes crash
    return code


if __name__ == "__main__":
    sys.exit(main())
