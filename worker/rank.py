"""Any rank but the first: does what the first one says, for as long as that one is there.

main thread    joins the process group, loads its share, executes plans
receiver       takes what comes, answers pings, and ends the process at once when the connection ends, also while
               the main thread waits for ranks that are gone
"""

import logging
import os
import queue
import threading
from contextlib import suppress

from pagoda.worker.build import build_rank
from pagoda.worker.config import EngineConfig
from pagoda.worker.engine_plan import plan_engine, rank_device
from pagoda.worker.parallel import join
from pagoda.worker.rank_link import Kind, RankLink, RankSeat, connect
from pagoda.worker.step_codec import StepDecoder
from pagoda.worker.tensor_parallel import ACK_PERIOD, MAX_AHEAD

logger = logging.getLogger(__name__)

_MAX_REASON_CHARACTERS = 2000


def run_rank(config: EngineConfig, seat: RankSeat) -> None:
    """Be the rank at `seat` until the first one says that it is over.

    Whatever goes wrong is reported to the first rank, then raised. If that one goes, this process ends, at once.
    """
    rank = _Rank(connect(seat))
    try:
        rank.run(config, seat)
    except Exception as error:
        rank.report(error)
        raise
    finally:
        rank.leave()


class _Rank:
    def __init__(self, link: RankLink) -> None:
        self._link = link
        # One more than can be on their way: the port to meet at, or the end.
        self._inbox: queue.Queue[tuple[Kind, bytes]] = queue.Queue(MAX_AHEAD + 2)
        self._is_over = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="rank-receiver", daemon=True)
        self._receiver.start()

    def run(self, config: EngineConfig, seat: RankSeat) -> None:
        kind, port = self._inbox.get()
        if kind is Kind.END:
            return
        plan = plan_engine(config)
        context = join(seat.rank, seat.size, host=seat.host, port=int(port), device=rank_device(plan, config))
        executor = build_rank(plan, config, context, progress=lambda *_: None)
        self._link.send(Kind.READY)
        decoder = StepDecoder()
        num_done = 0
        while True:
            kind, body = self._inbox.get()
            if kind is Kind.END:
                break
            executor.execute(decoder.decode(body))
            num_done += 1
            if num_done % ACK_PERIOD == 0:
                self._link.send(Kind.DONE)
        executor.shutdown()
        context.leave()

    def report(self, error: Exception) -> None:
        with suppress(OSError):
            text = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]
            self._link.send(Kind.FAILED, text.encode(errors="replace"))

    def leave(self) -> None:
        self._is_over.set()
        self._link.hang_up()
        self._receiver.join()
        self._link.close()

    def _receive(self) -> None:
        try:
            while True:
                kind, body = self._link.receive()
                if kind is Kind.PING:
                    self._link.send(Kind.PONG)
                else:
                    self._inbox.put_nowait((kind, body))
        except (OSError, EOFError):
            if not self._is_over.is_set():
                os._exit(1)
        except queue.Full as error:  # the first rank does not keep to what was agreed
            self.report(error)
            os._exit(1)
