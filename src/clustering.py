"""Two-stage k-means, and clusters of bounded sizes: pure functions of features.

Sources: many fine clusters whose centres are clustered again = MoDE (arXiv 2404.16030), as in decentralised diffusion
models (arXiv 2501.05450); entropic transport = Cuturi (arXiv 1306.0895).
"""

import numpy as np

PER_FINE = 8  # images that a fine cluster has on average, at least
CHUNK = 8192
EPSILON, ROUNDS = 0.05, 500  # of the entropic transport: its temperature in units of the mean cost


def two_stage(features: np.ndarray, fine: int, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Centres of `fine` clusters, float32 (f, d), and which of the `clusters` each belongs to, int16 (f,).

    There are fewer fine clusters, one for 8 images, where there are too few images. Raises ValueError where there are
    fewer images than clusters.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans

    if not 1 <= clusters <= len(features):
        raise ValueError(f"clusters={clusters} of {len(features)} images are impossible; choose from 1 to that many")
    fine = max(clusters, min(fine, len(features) // PER_FINE))
    first = MiniBatchKMeans(fine, random_state=seed, batch_size=4096, n_init=3).fit(features)
    second = KMeans(clusters, random_state=seed, n_init=10).fit(first.cluster_centers_)
    return first.cluster_centers_.astype(np.float32), second.labels_.astype(np.int16)


def nearest(features: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The nearest centroid of each row: int32 (n,)."""
    found = [_squared(rows, centroids).argmin(1) for rows in _chunks(features)]
    return np.concatenate([np.empty(0, np.int32), *found]).astype(np.int32)


def costs(features: np.ndarray, centroids: np.ndarray, coarse: np.ndarray, clusters: int) -> np.ndarray:
    """Squared distance to the nearest fine centroid of each cluster: (n, k); its smallest is the plain choice."""
    members = [np.flatnonzero(coarse == k) for k in range(clusters)]
    parts = []
    for rows in _chunks(features):
        all_fine = _squared(rows, centroids)
        parts.append(np.stack([all_fine[:, m].min(1) for m in members], 1))
    return np.concatenate(parts)


def imbalance(sizes: np.ndarray) -> float:
    """max_k |n_k / mean - 1|."""
    return float(np.abs(sizes / np.mean(sizes) - 1).max())


def capacity(cost: np.ndarray, low: int, high: int) -> np.ndarray:
    """A cluster for each row at little cost, each with `low` to `high` rows: int64 (n,).

    The most decided rows choose first among clusters with room; then clusters below `low` take the rows that lose
    least by it from clusters that can spare them. Raises ValueError where the bounds cannot hold.
    """
    n, k = cost.shape
    if not k * low <= n <= k * high:
        raise ValueError(f"{k} clusters of {low} to {high} images cannot hold {n} images; widen `bounds`")
    ranked = cost.argsort(1)
    first_two = np.take_along_axis(cost, ranked[:, : min(2, k)], 1)
    labels, sizes = np.empty(n, np.int64), np.zeros(k, np.int64)
    for row in np.argsort(first_two[:, 0] - first_two[:, -1], kind="stable"):
        choice = next(c for c in ranked[row] if sizes[c] < high)
        labels[row] = choice
        sizes[choice] += 1
    for poor in np.argsort(sizes):
        loss = cost[:, poor] - cost[np.arange(n), labels]
        for row in np.argsort(loss, kind="stable"):
            if sizes[poor] >= low:
                break
            if labels[row] != poor and sizes[labels[row]] > low:
                sizes[labels[row]] -= 1
                sizes[poor] += 1
                labels[row] = poor
    return labels


def sinkhorn(cost: np.ndarray, low: int, high: int) -> np.ndarray:
    """The same where clusters have prices: those of the entropic transport to sizes within the bounds.

    The sizes are the plain ones, moved into the bounds; rows then choose by cost and price, as in `capacity`.
    """
    k = cost.shape[1]
    plain = np.bincount(cost.argmin(1), minlength=k)
    if low <= plain.min() and plain.max() <= high:
        return cost.argmin(1)
    sizes = _within(plain, low, high)
    scaled = cost / (EPSILON * cost.mean())
    price = np.zeros(k)
    for _ in range(ROUNDS):
        share = np.exp(price - scaled - (price - scaled).max(1, keepdims=True))
        taken = (share / share.sum(1, keepdims=True)).sum(0)
        price += np.log(sizes / np.maximum(taken, 1e-300))
        if np.abs(taken / sizes - 1).max() < 1e-3:
            break
    return capacity(scaled - price, low, high)


BALANCE = {"none": None, "capacity": capacity, "sinkhorn": sinkhorn}


def _within(sizes: np.ndarray, low: int, high: int) -> np.ndarray:
    """The sizes moved into [low, high] with their sum unchanged: all scaled alike, then cut off (by bisection)."""
    smallest, largest = 0.0, high * len(sizes) / max(1, sizes[sizes > 0].min())
    for _ in range(100):
        middle = (smallest + largest) / 2
        total = np.clip(sizes * middle, low, high).sum()
        smallest, largest = (middle, largest) if total < sizes.sum() else (smallest, middle)
    return np.clip(sizes * largest, max(low, 1), high)


def _squared(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    rows, centroids = rows.astype(np.float64), centroids.astype(np.float64)
    return np.maximum((rows**2).sum(1)[:, None] - 2 * rows @ centroids.T + (centroids**2).sum(1), 0)


def _chunks(rows: np.ndarray):
    return (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))
