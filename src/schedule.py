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
    """Factor on the learning rate: linear warm-up, then constant, or half a cosine down to `floor` at `schedule_kimg`.

    Raises ValueError for an unknown decay, and for a decay without an end.
    """

    warmup_kimg: float = 0.0
    decay: str = "constant"  # or "cosine"
    schedule_kimg: float | None = None
    floor: float = 0.0

    def __post_init__(self):
        if self.decay not in ("constant", "cosine"):
            raise ValueError(f"decay={self.decay} is unknown; it may be constant or cosine")
        if self.decay == "cosine" and not self.schedule_kimg:
            raise ValueError("decay=cosine needs schedule_kimg > 0, where the cosine ends")

    def __call__(self, images: int) -> float:
        """The factor for the batch that starts after `images` images."""
        kimg = images / 1000
        factor = 1.0
        if self.decay == "cosine":
            factor = self.floor + (1 - self.floor) * (1 + cos(pi * min(1.0, kimg / self.schedule_kimg))) / 2
        if self.warmup_kimg:
            factor *= min(1.0, kimg / self.warmup_kimg)
        return factor
