"""A network of its own for some processes, whose cable can be pulled: what is sent then is lost, and nobody is told.

Linux network namespaces, a pair of virtual cards between them and us. Needs root; where it is not allowed, `network`
raises `PermissionError`.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """A namespace and the cable to it."""

    name: str
    our_address: str
    """Of this side, as processes in there see it."""
    their_address: str
    """Of the processes in there, as this side sees them."""

    def command(self, *words: str) -> list[str]:
        """To run something in there."""
        return ["ip", "netns", "exec", self.name, *words]

    def pull(self) -> None:
        """From now on whatever either side sends is lost."""
        self._set("down")

    def plug(self) -> None:
        """As before."""
        self._set("up")

    def _set(self, state: str) -> None:
        _run(*self.command("ip", "link", "set", "inside", state))
        if state == "up":  # what had been there went with the link
            _run(*self.command("ip", "addr", "replace", f"{self.their_address}/30", "dev", "inside"))


@contextmanager
def network() -> Iterator[Network]:
    """Make one, and take it away at the end."""
    number = os.getpid() % 16_000
    high, low = divmod(4 * number, 256)
    name, outside = f"pagoda{number}", f"pgd{number}"
    made = Network(name, f"10.213.{high}.{low + 1}", f"10.213.{high}.{low + 2}")
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "inside", "netns", name)
        _run("ip", "addr", "add", f"{made.our_address}/30", "dev", outside)
        _run("ip", "link", "set", outside, "up")
        _run(*made.command("ip", "link", "set", "lo", "up"))
        _run(*made.command("ip", "addr", "add", f"{made.their_address}/30", "dev", "inside"))
        made.plug()
        yield made
    finally:
        _run("ip", "netns", "del", name)  # the cards go with it


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PermissionError("there is no ip command") from error
    if done.returncode:
        problem = f"{' '.join(command)}: {done.stderr.strip()}"
        raise PermissionError(problem) if "permitted" in problem or "denied" in problem else OSError(problem)
