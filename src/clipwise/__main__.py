"""python -m clipwise"""

import sys

from .cli import main

sys.exit(main())
