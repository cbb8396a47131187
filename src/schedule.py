"""Time counted in images: when something is due, and the learning rate as a pure function of images seen."""

from dataclasses import dataclass
from math import cos, pi


def due(images: int, batch: int, every_kimg: float | None) -> bool:
    """Whether the batch that ended at `images` images crossed a multiple of `every_kimg` thousand; never if None."""
    if every_kimg is None:
        return False
    every = max(1, round(every_kimg * 1000))
    return images // every > (images - batch) // every


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear warm-up, then constant, or half a cosine from its start down to the rate `floor`.

    The cosine ends at `schedule_kimg` thousand images. Raises ValueError for an unknown decay, or one without an end.
    """

    warmup_kimg: float = 0.0
    decay: str = "constant"  # or "cosine"
    schedule_kimg: float | None = None
    floor: float = 0.0

    def __post_init__(self):
        if self.decay not in ("constant", "cosine"):
            raise ValueError(f"model.schedule.decay={self.decay} is unknown; it may be constant or cosine")
        if self.decay == "cosine" and not self.schedule_kimg:
            raise ValueError("model.schedule.decay=cosine needs schedule_kimg > 0, where the cosine ends")

    def rate(self, initial: float, images: int) -> float:
        """The learning rate of the batch that starts after `images` images, where `initial` is the optimizer's own."""
        kimg, rate = images / 1000, initial
        if self.decay == "cosine":
            floor = min(self.floor, initial)
            rate = floor + (initial - floor) * (1 + cos(pi * min(1.0, kimg / self.schedule_kimg))) / 2
        return rate * min(1.0, kimg / self.warmup_kimg) if self.warmup_kimg else rate
