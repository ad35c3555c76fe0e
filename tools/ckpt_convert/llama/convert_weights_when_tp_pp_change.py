"""Files for each rank -> another layout; is `mindspeed convert --format torch`."""

import sys

from mindspeed.cli.ckpt_convert import change_layout

if __name__ == "__main__":
    sys.exit(change_layout(sys.argv[1:]))
