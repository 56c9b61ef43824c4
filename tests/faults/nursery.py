"""The process that fake workers are forked from: all is imported, so that one that died is replaced in a moment.

    cluster ── socket ──► nursery ── fork ──► worker ── another socket ──► cluster

Run it as `python nursery.py FILE_DESCRIPTOR`. It has one thread, as a process must have that is to be forked.
"""

import gc
import os
import pickle
import signal
import socket
import sys

from fake_worker import be_worker

READY = b"ready"


def _be_nursery(control: socket.socket) -> None:
    """Fork a worker for each message that comes with a socket, and answer with its process id, until nobody asks."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the cluster decides who ends
    gc.freeze()
    control.sendall(READY)
    while True:
        data, files, _, _ = socket.recv_fds(control, 65536, 1)
        if not data:
            return
        process = os.fork()
        if process == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                be_worker(socket.socket(fileno=files[0]), pickle.loads(data))
            finally:
                os._exit(0)
        os.close(files[0])
        control.sendall(str(process).encode())


if __name__ == "__main__":
    _be_nursery(socket.socket(fileno=int(sys.argv[1])))
