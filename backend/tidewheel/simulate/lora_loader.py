from pathlib import Path

from tidewheel.lora import Lora
from tidewheel.scheduler.lora_slots import LoraSlots


class LoraLoader:
    """Adapters of one replica. One is read at a time, in `load_s` seconds, and stays in host memory."""

    def __init__(self, slots: LoraSlots, load_s: float) -> None:
        self._slots = slots
        self._load_s = load_s
        self._loras: dict[str, Lora] = {}
        self._reading: tuple[float, Lora] | None = None  # with the time of its end
        slots.load = self._load

    def lora(self, name: str) -> Lora | None:
        return self._loras.setdefault(name, Lora(name, len(self._loras), Path())) if name else None

    def advance(self) -> None:
        """Give the adapter its weights, if the read has taken `load_s`."""
        if self._reading is not None and self._reading[0] <= self._slots.now:
            self._reading[1].weights, self._reading = True, None

    def _load(self, lora: Lora) -> None:
        if self._reading is None:
            self._reading = (self._slots.now + self._load_s, lora)
