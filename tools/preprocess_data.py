"""The script path of old command lines: the same as ``mindspeed preprocess``."""

import sys

from mindspeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
