"""The trainer's job runner lives beside the trainer's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))
