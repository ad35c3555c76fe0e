"""Trains a model of any family: torchrun pretrain_gpt.py --config NAME is `mindspeed pretrain`."""

import sys

from mindspeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]]))
