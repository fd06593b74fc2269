"""Where this checkout is, and folders of it."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
EXPERIMENTS = ROOT / "experiments"
