"""Scores a model on benchmarks: `mindspeed evaluate` with the original suite's flags."""

import sys

from mindspeed.cli.task_scripts import run_evaluation

if __name__ == "__main__":
    sys.exit(run_evaluation())
