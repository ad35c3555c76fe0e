"""The script path of old command lines: the same as ``mindspeed merge-lora``."""

import sys

from mindspeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["merge-lora", *sys.argv[1:]]))
