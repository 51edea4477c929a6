"""The gateway's attention workers as one: started, told and stopped together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from expertmesh.attention_settings import AttentionWorkerSettings
from expertmesh.cores import CoreShare
from expertmesh.placement import ExpertMap
from gateway.attention.client import AttentionClient
from gateway.attention.connection import Observer


def worker_name(index: int) -> str:
    """What an attention worker is called."""
    return f"attention-worker-{index}"


class AttentionGroup:
    """Equal attention workers. Methods may be called from any thread.

    Args:
        settings: For each of them; they share the memory that is meant for KV caches.
        shares: Threads and cores of each; there are as many as shares.
        fingerprint: Of the model that the gateway serves.
        gateway: Incarnation of the gateway.
        on_observations: Takes what they saw of expert workers, in threads of their own.
    """

    def __init__(
        self,
        settings: AttentionWorkerSettings,
        shares: Sequence[CoreShare],
        fingerprint: bytes,
        gateway: int,
        on_observations: Observer,
    ) -> None:
        share = settings.engine.kv_memory_fraction / len(shares)
        engine = dataclasses.replace(settings.engine, kv_memory_fraction=share)
        self._clients = tuple(
            AttentionClient(
                dataclasses.replace(
                    settings, engine=engine, threads=share.num_threads, cores=share.cores
                ),
                fingerprint,
                gateway,
                on_observations=on_observations,
                name=worker_name(index),
            )
            for index, share in enumerate(shares)
        )

    def __iter__(self) -> Iterator[AttentionClient]:
        return iter(self._clients)

    @property
    def processes(self) -> dict[str, int]:
        """Name to process id of the present lives."""
        named = ((worker_name(index), client.pid) for index, client in enumerate(self._clients))
        return {name: pid for name, pid in named if pid is not None}

    @property
    def pids(self) -> list[int]:
        """Process ids of the present lives."""
        return list(self.processes.values())

    def start(self) -> None:
        """Starts all at the same time and waits until they serve.

        Raises:
            StartupError: One cannot start; says why. `stop` is to be called all the same.
        """
        with ThreadPoolExecutor(len(self._clients), "attention-start") as pool:
            starts = [pool.submit(client.start) for client in self._clients]
        for start in starts:
            start.result()

    def update_map(self, expert_map: ExpertMap) -> None:
        """Sends an expert map to all."""
        for client in self._clients:
            client.update_map(expert_map)

    def stop(self, grace_s: float) -> None:
        """Ends all at the same time; kills what is left after the grace."""
        with ThreadPoolExecutor(len(self._clients), "attention-stop") as pool:
            for client in self._clients:
                pool.submit(client.stop, grace_s)
