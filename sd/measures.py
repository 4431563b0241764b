"""Distances between two sets of pictures, from their features, in float64. KID alone minds the rows' order."""

from collections.abc import Iterator

import numpy as np

BLOCK = 1024  # rows of a matrix of distances that are in memory at once
KID_SUBSETS, KID_SIZE, KID_SEED = 100, 1000, 2020  # torch-fidelity's, so that its numbers are met
NEAREST_PR, NEAREST_DC = 3, 5  # k of precision and recall, and of density and coverage: those of their papers
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0


def as_features(x: np.ndarray) -> np.ndarray:
    """Features [N, D] in float64. ValueError unless they are finite and there are two or more."""
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f"finite features [2 or more, D] were wanted, found {x.shape}")
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Fréchet distance
# ---------------------------------------------------------------------------------------------------------------------


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [D] and covariance [D, D] (divided by N - 1) of features [N, D]."""
    x = as_features(x)
    mean = x.mean(0)
    centred = x - mean
    return mean, centred.T @ centred / (len(x) - 1)


def root(covariance: np.ndarray) -> np.ndarray:
    """The symmetric square root [D, D] of a covariance. Eigenvalues below what rounding makes of zero are zero: their
    roots would be ten million times as large."""
    values, vectors = np.linalg.eigh(covariance)
    values[values < len(values) * np.finfo(np.float64).eps * max(values[-1], 0.0)] = 0
    return (vectors * np.sqrt(values)) @ vectors.T


def frechet(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    """Squared Fréchet distance of two Gaussians, each (mean, covariance) as moments() gives them.

    |m1 - m2|^2 + tr C1 + tr C2 - 2 tr (C1 C2)^(1/2) (Dowson & Landau 1982; FID: Heusel et al. 2017, eq. 6). The last
    trace is the sum of the singular values of C1^(1/2) C2^(1/2). No matrix square root of the product is taken: scipy's
    sqrtm has changed between versions, and gives complex numbers for singular covariances.
    """
    (mean_a, cov_a), (mean_b, cov_b) = a, b
    cross = np.linalg.svd(root(cov_a) @ root(cov_b), compute_uv=False).sum()
    return float(np.square(mean_a - mean_b).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * cross)


def frechet_distance(x: np.ndarray, y: np.ndarray) -> float:
    """frechet() of the moments of features [N, D] and [M, D].

    Of few rows without their covariances: the singular values of C1^(1/2) C2^(1/2) are those of X Y^T, of the centred
    rows, over the root of (N - 1)(M - 1). That is faster, and loses no digits to zero eigenvalues.
    """
    x, y = as_features(x), as_features(y)
    if max(len(x), len(y)) > x.shape[1]:
        return frechet(moments(x), moments(y))
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = (x - mean_x) / np.sqrt(len(x) - 1), (y - mean_y) / np.sqrt(len(y) - 1)
    cross = np.linalg.svd(x @ y.T, compute_uv=False).sum()
    return float(np.square(mean_x - mean_y).sum() + np.square(x).sum() + np.square(y).sum() - 2 * cross)


# ---------------------------------------------------------------------------------------------------------------------
# Kernel distances
# ---------------------------------------------------------------------------------------------------------------------


def cubic_mmd(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased squared MMD of features [m, D] and [n, D] under the kernel (x.y / D + 1)^3 (Bińkowski et al. 2018)."""
    width = x.shape[1]

    def kernel(p, q):
        return (p @ q.T / width + 1) ** 3

    def off_diagonal(p):
        k = kernel(p, p)
        return (k.sum() - np.trace(k)) / (len(p) * (len(p) - 1))

    return float(off_diagonal(x) + off_diagonal(y) - 2 * kernel(x, y).mean())


def kid(real: np.ndarray, fake: np.ndarray, subsets=KID_SUBSETS, size=KID_SIZE, seed=KID_SEED) -> tuple[float, float]:
    """KID: mean and standard deviation of cubic_mmd over random subsets of `size` rows a side.

    ValueError if a subset would be larger than a set. numpy's old generator draws them, whose numbers never change.
    """
    real, fake = as_features(real), as_features(fake)
    if not 2 <= size <= min(len(real), len(fake)):
        raise ValueError(f"KID's subsets want 2 to {min(len(real), len(fake))} rows, found {size}")
    draw = np.random.RandomState(seed)
    values = [
        cubic_mmd(real[draw.choice(len(real), size, replace=False)], fake[draw.choice(len(fake), size, replace=False)])
        for _ in range(subsets)
    ]
    return float(np.mean(values)), float(np.std(values))


def cmmd(real: np.ndarray, fake: np.ndarray, sigma: float = CMMD_SIGMA) -> float:
    """CMMD (Jayasumana et al. 2024): 1000 times the squared MMD of features of unit length under the kernel
    exp(-|x - y|^2 / 2 sigma^2). As published, with each row's kernel with itself: never negative, and biased by 1/N."""
    real, fake = (unit(as_features(x)) for x in (real, fake))

    def apart(p, q):  # mean of 1 - kernel, which is small: a mean of the kernel itself would lose digits
        total = sum(float(-np.expm1(-d / (2 * sigma**2)).sum()) for _, d in squared_distances(p, q, False))
        return total / (len(p) * len(q))

    return float(CMMD_SCALE * (2 * apart(real, fake) - apart(real, real) - apart(fake, fake)))


def unit(x: np.ndarray) -> np.ndarray:
    """Rows [N, D] of length 1."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def clip_score(images: np.ndarray, texts: np.ndarray) -> float:
    """Mean of 100 max(cos, 0) of pictures' and their texts' features, each [N, D] (Hessel et al. 2021)."""
    cosines = (unit(np.asarray(images, np.float64)) * unit(np.asarray(texts, np.float64))).sum(1)
    return float(100 * np.maximum(cosines, 0).mean())


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours
# ---------------------------------------------------------------------------------------------------------------------


def squared_distances(x: np.ndarray, y: np.ndarray, itself: bool) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks of rows: (which rows of x, their squared distances [rows, len(y)] to y). itself: x is y, and the distance
    of a row to itself is infinite. What rounding leaves between equal rows becomes 0."""
    x_norm, y_norm = np.square(x).sum(1), np.square(y).sum(1)
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        sizes = x_norm[rows, None] + y_norm
        block = sizes - 2 * x[rows] @ y.T
        block[block < 1e-13 * sizes] = 0
        if itself:
            block[np.arange(len(block)), start + np.arange(len(block))] = np.inf
        yield rows, block


def radii(x: np.ndarray, k: int) -> np.ndarray:
    """Squared distance [N] of each row to its k-th nearest other row."""
    return np.concatenate([np.partition(block, k - 1, axis=1)[:, k - 1] for _, block in squared_distances(x, x, True)])


def manifolds(real: np.ndarray, fake: np.ndarray, k: int) -> dict[str, float]:
    """Precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020), with balls that reach
    to each row's k-th nearest neighbour in its own set.

    precision: share of fake rows in some real ball; recall: of real rows in some fake ball; density: mean number of
    real balls around a fake row, over k; coverage: share of real balls with a fake row in them. ValueError unless both
    sets have more than k rows.
    """
    real, fake = as_features(real), as_features(fake)
    if min(len(real), len(fake)) <= k:
        raise ValueError(f"more than k = {k} rows a side were wanted, found {len(real)} and {len(fake)}")
    middle = real.mean(0)  # distances are what they were, and lose fewer digits
    real, fake = real - middle, fake - middle
    real_radii, fake_radii = radii(real, k), radii(fake, k)
    inside, recalled, covered = np.zeros(len(fake), np.int64), 0, 0
    for rows, block in squared_distances(real, fake, False):
        within = block < real_radii[rows, None]  # [rows, fake]
        inside += within.sum(0)
        covered += within.any(1).sum()
        recalled += (block < fake_radii).any(1).sum()
    return {
        "precision": float((inside > 0).mean()),
        "recall": float(recalled / len(real)),
        "density": float(inside.mean() / k),
        "coverage": float(covered / len(real)),
    }


def nearest(real: np.ndarray, fake: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each fake row: the nearest real row (index, the first of several), the distance to it, and that real row's
    distance to its own nearest real neighbour; each [len(fake)].

    A fake row that is nearer to a real one than any other real row is, is suspect of being a copy (the authenticity of
    Alaa et al. 2022, section 4.3).
    """
    real, fake = as_features(real), as_features(fake)
    middle = real.mean(0)
    real, fake = real - middle, fake - middle
    index, distance = np.zeros(len(fake), np.int64), np.zeros(len(fake))
    for rows, block in squared_distances(fake, real, False):
        index[rows] = block.argmin(1)
        distance[rows] = np.sqrt(block.min(1))
    return index, distance, np.sqrt(radii(real, 1))[index]
