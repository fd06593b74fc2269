"""Check the exercises: nine functions in `yours.py`, solved in `solved.py`.

python experiments/lessons/exercises [--solved] [NAME ...]
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

from checks import CHECKS  # noqa: E402 - the paths above are for it
from devices import use_eight_devices  # noqa: E402
from narration import show  # noqa: E402


def verdict(name: str, module: str) -> str:
    """Return "right", or the mistake of a function of `yours` or `solved`."""
    try:
        CHECKS[name](getattr(importlib.import_module(module), name))
    except NotImplementedError as error:
        return f"not yet. {error}"
    except Exception as error:  # of the reader's own code
        return f"wrong: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "right"


def main(argv: list[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser("exercises", description=__doc__, formatter_class=formatter)
    options.add_argument("--solved", action="store_true", help="check the solutions")
    options.add_argument("names", nargs="*", choices=[*CHECKS, []], metavar="NAME", help=", ".join(CHECKS))
    given = options.parse_args(argv)
    use_eight_devices()
    found = [(name, verdict(name, "solved" if given.solved else "yours")) for name in given.names or CHECKS]
    show("Exercises", ("function", "verdict"), found)
    return int(any(each != "right" for _, each in found))


if __name__ == "__main__":
    sys.exit(main())
