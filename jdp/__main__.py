"""`python -m jdp` is `jdp`."""

import sys

from jdp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
