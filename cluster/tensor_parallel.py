"""The other ranks of a replica as Ray actors, in the replica's own placement group."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagoda.cluster.logs import LogLevel, log_through_serve
from pagoda.worker.config import EngineConfig
from pagoda.worker.rank import run_rank
from pagoda.worker.rank_link import RankSeat


class RankActor:
    """One rank."""

    def __init__(self, log_level: LogLevel) -> None:
        log_through_serve(log_level)

    def run(self, config: EngineConfig, seat: RankSeat) -> None:
        """Be that rank to the end."""
        run_rank(config, seat)


class RayRanks:
    """Implements `RankProcesses`.

    Rank n is in bundle n of the placement group that this process's replica is in. Ray shows each process only the GPU
    that is reserved for it, so all of them compute on the first one that they see.
    """

    def __init__(
        self,
        config: EngineConfig,
        seats: Sequence[RankSeat],
        *,
        environment: Mapping[str, str],
        num_gpus: int,
        log_level: LogLevel,
    ) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None, "the replica was deployed without one"
        actor: Any = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0)(RankActor)
        self._actors: dict[int, ActorHandle[Any]] = {
            seat.rank: actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=seat.rank),
                runtime_env={"env_vars": dict(environment)},
            ).remote(log_level)
            for seat in seats
        }
        self._running: dict[int, Any] = {seat.rank: self._actors[seat.rank].run.remote(config, seat) for seat in seats}

    def problem(self, suspect: int | None = None) -> str | None:
        for rank, running in sorted(self._running.items(), key=lambda item: item[0] != suspect):
            ended, _ = ray.wait([running], timeout=0)
            if ended:
                return f"the actor of rank {rank} has ended{_how(running)}"
        return None

    def kill(self) -> None:
        for actor in self._actors.values():
            with suppress(RayError):  # Ray is about to end, and they with it
                ray.kill(actor)


def _how(running: Any) -> str:
    """Why a call that has ended did so, in one line."""
    try:
        ray.get(running)
    except RayTaskError as error:
        return f": {error.cause}"
    except Exception as error:  # noqa: BLE001  (whatever Ray says)
        return f": {next(iter(str(error).splitlines()), '')}"
    return ""
