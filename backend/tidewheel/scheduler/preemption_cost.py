"""Recompute or swap: which of the two brings a preempted request back sooner."""

from __future__ import annotations

from tidewheel.scheduler.step_time import StepTime


class PreemptionCost:
    """Compares the time on the device that each way back costs.

        recompute    computed tokens · seconds per chunk token        as `StepTime` has learned it
        swap         2 · blocks · seconds per block                   once out, once in

    After vLLM (Kwon et al., SOSP 2023, section 4.5), which offers both ways and leaves the choice to the user.
    """

    __slots__ = ("_step_time", "_swap_seconds_per_block")

    def __init__(self, step_time: StepTime, swap_seconds_per_block: float | None) -> None:
        """`swap_seconds_per_block`: of one copy of a block, in one direction; None: there is no host tier."""
        self._step_time = step_time
        self._swap_seconds_per_block = swap_seconds_per_block

    def should_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """Recompute wins a draw, and until the step time is known: it needs no host memory."""
        swap = self.swap_seconds(num_blocks)
        return swap is not None and swap < self.recompute_seconds(num_computed_tokens)

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens * self._step_time.seconds_per_token

    def swap_seconds(self, num_blocks: int) -> float | None:
        """None without a host tier."""
        if self._swap_seconds_per_block is None:
            return None
        return 2.0 * num_blocks * self._swap_seconds_per_block
