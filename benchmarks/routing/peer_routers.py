"""Published routers, restated as routers of the simulator with their published defaults.

- Power of two choices: the less loaded one of two replicas at random (Mitzenmacher, 2001; Ray Serve's default).
- SGLang's gateway, `cache_aware` (sgl-model-gateway, `policies/cache_aware.rs`; defaults of `router_args.py`): the
  shortest queue while the load is imbalanced, that is max - min > 64 and max > 1.5 min; else a replica that was sent
  more than 0.3 of the prompt, else the shortest queue.
- NVIDIA Dynamo's KV router (kv-router, `selector/default.rs`, `config.rs`): the least of prompt blocks to compute,
  with those that wait and without those that are cached, plus blocks of running requests, each with weight 1;
  temperature 0. Its knowledge of the caches is exact here, as from its KV events, and its blocks are the engine's.
- Ray Serve's PrefixCacheAffinityRouter (ray 2.60, `prefix_aware_router.py`): of the replicas that were sent the
  longest part of the prompt, if that is 0.1 of it or more, the shortest queue; else one that was sent the fewest
  characters. `imbalanced_threshold` is infinite, so queues are no reason to choose another.

Trees of characters are chains of hashes of 32 tokens here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

import numpy as np

from tidewheel.fleet.router import RoutedRequest, Router, RouteRequest
from tidewheel.simulate.cost_model import H200_8B

TREE_TOKENS = 32
CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5  # SGLang
MATCH_RATE = 0.1  # Ray


class PeerRouter(Router[int]):
    def open_of(self, replica: int) -> float:
        return float(self.num_open[self.slots[replica]])


class PowerOfTwo(PeerRouter):
    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(0)

    def choose(self, request: RouteRequest, excluded: Collection[int] = ()) -> int | None:  # noqa: ARG002
        replicas = [replica for replica in self.slots if replica not in excluded]
        if len(replicas) < 2:
            return replicas[0] if replicas else None
        pair = self._rng.choice(len(replicas), 2, replace=False)
        return min((replicas[index] for index in pair), key=self.open_of)


class SentPrompts:
    """Chunks of prompts, and the replicas that they were sent to: what an approximate radix tree tells."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[int, None]] = defaultdict(dict)
        self.num_chunks: Counter[int] = Counter()  # by replica

    def insert(self, chunks: Sequence[int], replica: int) -> None:
        for chunk in chunks:
            if replica not in self._holders[chunk]:
                self._holders[chunk][replica] = None
                self.num_chunks[replica] += 1

    def longest(self, chunks: Sequence[int], present: Collection[int]) -> tuple[int, list[int]]:
        """Return how many first chunks were sent to one replica, and all replicas that they were sent to."""
        best: tuple[int, list[int]] = (0, [])
        for depth, chunk in enumerate(chunks, 1):
            found = [replica for replica in self._holders.get(chunk, ()) if replica in present]
            if not found:
                break
            best = (depth, found)
        return best


class CacheAware(PeerRouter):
    chunk_tokens = TREE_TOKENS

    def __init__(self) -> None:
        super().__init__()
        self._sent = SentPrompts()

    def choose(self, request: RouteRequest, excluded: Collection[int] = ()) -> int | None:
        num_open = [self.open_of(replica) for replica in self.slots]
        low, high = min(num_open), max(num_open)
        depth, found = self._sent.longest(request.chunks, self.slots)
        is_imbalanced = high - low > BALANCE_ABS and high > BALANCE_REL * low
        if is_imbalanced or depth * request.chunk_tokens <= CACHE_THRESHOLD * request.num_tokens:
            return super().choose(request, excluded)
        return found[0]

    def chosen(self, request: RouteRequest, replica: int) -> RoutedRequest[int]:
        self._sent.insert(request.chunks, replica)
        return super().chosen(request, replica)


class PrefixCacheAffinity(PeerRouter):
    chunk_tokens = TREE_TOKENS

    def __init__(self) -> None:
        super().__init__()
        self._sent = SentPrompts()

    def choose(self, request: RouteRequest, excluded: Collection[int] = ()) -> int | None:  # noqa: ARG002
        depth, found = self._sent.longest(request.chunks, self.slots)
        if depth * request.chunk_tokens < MATCH_RATE * request.num_tokens:
            least = min(self._sent.num_chunks[replica] for replica in self.slots)
            found = [replica for replica in self.slots if self._sent.num_chunks[replica] == least]
        return min(found, key=self.open_of)

    def chosen(self, request: RouteRequest, replica: int) -> RoutedRequest[int]:
        self._sent.insert(request.chunks, replica)
        return super().chosen(request, replica)


class LeastBlocks(Router[int]):
    """Dynamo's; `cached_tokens` tells what a replica has of the request that is being routed."""

    chunk_tokens = H200_8B.block_size

    def __init__(self) -> None:
        super().__init__()
        self.cached_tokens: Callable[[int], int] = lambda _: 0
        self._rng = np.random.default_rng(0)
        self._active: dict[int, Counter[int]] = defaultdict(Counter)  # replica → chunk → requests
        self._private: Counter[int] = Counter()  # replica → partial blocks

    def choose(self, request: RouteRequest, excluded: Collection[int] = ()) -> int | None:  # noqa: ARG002
        costs = {replica: self._cost(request, replica) for replica in self.slots}
        best = min(costs.values())
        return int(self._rng.choice([replica for replica, cost in costs.items() if cost == best]))

    def _cost(self, request: RouteRequest, replica: int) -> float:
        slot = self.slots[replica]
        waiting = float(self.waiting[-1, slot])
        prefill = max(waiting + request.num_tokens - self.cached_tokens(replica), 0.0) / request.chunk_tokens
        active = self._active[replica]
        return prefill + len(active) + self._private[replica] + sum(chunk not in active for chunk in request.chunks)

    def chosen(self, request: RouteRequest, replica: int) -> RoutedRequest[int]:
        self._active[replica].update(request.chunks)
        self._private[replica] += 1
        num_uncached = max(request.num_tokens - self.cached_tokens(replica), 0)
        return self.count(request, replica, num_uncached)

    def ended(self, routed: RoutedRequest[int], num_cached_tokens: int | None = None) -> None:  # noqa: ARG002
        active = self._active[routed.replica]
        for chunk in routed.request.chunks:
            active[chunk] -= 1
            if not active[chunk]:
                del active[chunk]
        self._private[routed.replica] -= 1
        super().ended(routed)
