"""Shows what a model says; --task 1 to 6: see mindspeed.cli.task_scripts."""

import sys

from mindspeed.cli.task_scripts import run_inference

if __name__ == "__main__":
    sys.exit(run_inference(__file__))
