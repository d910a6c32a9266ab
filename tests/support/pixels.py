"""Which colours a picture has."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from matplotlib import image
from matplotlib.colors import to_rgb


def pixels_of(picture: Path) -> Callable[[str], int]:
    """How many pixels of a picture have a colour."""
    counts = Counter(map(tuple, (image.imread(picture)[:, :, :3] * 255).round().astype(int).reshape(-1, 3).tolist()))
    return lambda colour: counts[tuple(round(255 * part) for part in to_rgb(colour))]
