"""`pagoda top`: the workers of a service, live in the terminal."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pagoda.cluster.commands.credentials import credential_options
from pagoda.cluster.commands.directory_http import ask
from pagoda.worker.config import require_in_range

_HEAD = (
    f"{'worker':>8} {'state':>9} {'running':>9} {'waiting':>7} {'reserved':>8} {'queued tok':>10} "
    f"{'KV used':>8} {'cached':>8} {'placed':>7} {'hits':>6}"
)


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", help="The server.")
@click.option("--interval-s", type=float, default=1.0, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once, and end.")
@credential_options
def top(url: str, interval_s: float, once: bool, api_key: str | None, ca_cert: Path | None) -> None:
    """Watch the workers: load, KV cache, hits, and why requests went where they went. Ctrl-C ends."""
    require_in_range("interval_s", interval_s, 0.1, 3600)
    is_live = sys.stdout.isatty() and not once
    while True:
        text = "\n".join(lines(ask(url, "/directory/stats", api_key=api_key, ca_cert=ca_cert)))
        click.echo(f"\033[H\033[2J{text}" if is_live else text)
        if once:
            return
        time.sleep(interval_s)


def lines(stats: Mapping[str, Any]) -> list[str]:
    """`pagoda.v1.DirectoryStats` as JSON, for people."""
    placements = {reason: int(count) for reason, count in stats["placements"].items()}
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(placements.items())) or "none yet"
    placed, cached = int(stats["placed_tokens"]), int(stats["placed_cached_tokens"])
    text = [
        f"{len(stats['workers'])} workers, {int(stats['num_entries']):,} blocks known, up {stats['uptime_s']:,.0f} s",
        f"reservations: {int(stats['reservations'])}",
        f"placements by reason: {reasons}",
        f"prompt tokens that were cached where they went: {_ratio(cached, placed)}",
        _HEAD,
    ]
    for worker in sorted(stats["workers"], key=lambda each: each["worker_id"]):
        num_blocks = int(worker["num_blocks"])
        used = _ratio(num_blocks - int(worker["num_free_blocks"]), num_blocks)
        text.append(
            f"{worker['worker_id'][:8]:>8} {'exact' if worker['is_exact'] else 'degraded':>9} "
            f"{worker['num_running']}/{worker['max_num_seqs']}".ljust(28)
            + f"{worker['num_waiting']:>8} {worker['reserved_sequences']:>8} {int(worker['num_uncached_tokens']):>10,} "
            f"{used:>8} {sum(map(int, worker['num_blocks_held'])):>8,} {int(worker['placements']):>7,} "
            f"{_ratio(int(worker['placed_cached_tokens']), int(worker['placed_tokens'])):>6}"
        )
    return text


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
