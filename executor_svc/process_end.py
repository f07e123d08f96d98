"""How an executor process ends. Loads nothing, so that it may run before anything else could be."""

import logging
import os
import sys
import threading
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """Ends the process. A load or a device step that nobody waits for any more must not hold or crash its end."""
    if any(thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
