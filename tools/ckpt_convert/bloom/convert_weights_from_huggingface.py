"""Hugging Face weights -> files for each rank; is `mindspeed convert --format torch`."""

import sys

from mindspeed.cli.ckpt_convert import from_hugging_face

if __name__ == "__main__":
    sys.exit(from_hugging_face(sys.argv[1:]))
