"""``python -m torchtitan_zephon``: the ``torchtitan-zephon`` command."""

import sys

from torchtitan_zephon.cli import main

if __name__ == "__main__":
    sys.exit(main())
