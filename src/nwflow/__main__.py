"""``python -m nwflow`` is the command ``nwflow``."""

import sys

from nwflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
