"""Lets the tests serve the small models of tests/engine."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
