"""The tests here use the trainer's rank setup."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))  # trainer_warm
