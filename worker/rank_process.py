"""`python -m pagoda.worker.rank_process`: one rank; which one, its parent says on standard input."""

import logging
import pickle
import signal
import sys

from torch import distributed

from pagoda.worker.errors import PagodaError
from pagoda.worker.rank import run_rank

logger = logging.getLogger(__name__)


def main() -> int:
    logging.basicConfig(level=logging.ERROR)  # what the first rank warns of need not be said once for each
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the first rank says when it is over, or ends
    config, seat = pickle.load(sys.stdin.buffer)
    try:
        run_rank(config, seat)
    except PagodaError:  # the first rank has been told, and tells the user
        return 1
    except Exception as error:
        if "gloo" not in str(error) and not isinstance(error, distributed.DistError):  # else another rank has ended
            logger.exception("rank %d failed", seat.rank)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
