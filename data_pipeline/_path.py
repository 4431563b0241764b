"""Lets the scripts of this folder import what lies above it."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
