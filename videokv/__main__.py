"""``python -m videokv``."""

import sys

from videokv.entry import main

if __name__ == "__main__":
    sys.exit(main())
