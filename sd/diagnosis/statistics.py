"""Statistics that judge a noisy course: errors are those of the noise that is there, not a guess."""

import numpy as np


def mean_and_error(values) -> tuple[float, float]:
    """The mean of independent values and its standard error (infinite of fewer than two)."""
    x = np.asarray(values, float)
    return float(x.mean()) if len(x) else float("nan"), float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else np.inf


def standard_errors(values) -> float:
    """How many standard errors the mean of independent values lies from 0; 0 where all are 0."""
    mean, error = mean_and_error(values)
    return mean / error if error else float(np.sign(mean)) * np.inf if mean else 0.0


def debiased(rows: list[dict]) -> np.ndarray:
    """The loss of each line of log.jsonl, less what its draw of timesteps adds: the mean over the bins it has of each
    bin's difference from that bin's mean over the run, float [rows]; NaN of lines without any."""
    table = np.array([[np.nan if b is None else b for b in row.get("bins") or [None]] for row in rows], float)
    if not table.size:
        return np.zeros(0)
    with np.errstate(all="ignore"):
        counts = (~np.isnan(table)).sum(axis=0).clip(1)
        off = table - np.nansum(table, axis=0) / counts
        have = (~np.isnan(off)).sum(axis=1)
        return np.where(have > 0, np.nansum(off, axis=1) / have.clip(1), np.nan)


def slope(values) -> tuple[float, float]:
    """Least-squares slope per step of a series and its standard error, for noise that is independent from step to step
    (a series that wanders has a larger one)."""
    y = np.asarray(values, float)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    if len(y) < 3:
        return float("nan"), float("inf")
    b = (x * y).sum() / (x * x).sum()
    rest = y - y.mean() - b * x
    return float(b), float(np.sqrt((rest**2).sum() / (len(y) - 2) / (x * x).sum()))


def alternation(values) -> float:
    """How many standard errors the lag-1 autocorrelation of a series' differences from its line lies below that of
    independent noise, which is -1/n with a standard error of 1/sqrt(n): above 4, it swings to and fro."""
    y = np.asarray(values, float)
    if len(y) < 20:
        return 0.0
    b, _ = slope(y)
    rest = y - y.mean() - b * (np.arange(len(y)) - (len(y) - 1) / 2)
    total = (rest**2).sum()
    return float(-((rest[1:] * rest[:-1]).sum() / total + 1 / len(y)) * len(y) ** 0.5) if total else 0.0


def association(x: np.ndarray, y: np.ndarray, rounds: int = 100, seed: int = 0) -> float:
    """How much rows of x [N, V] tell of rows of y [N, D], by a permutation test: the sum of all squared correlations,
    in standard deviations above its mean over shuffled rows."""

    def standard(a):
        a = a - a.mean(axis=0)
        spread = a.std(axis=0)
        return a[:, spread > 0] / spread[spread > 0]

    x, y = standard(np.asarray(x, float)), standard(np.asarray(y, float))
    if not x.size or not y.size:
        return 0.0
    rng = np.random.default_rng(seed)
    null = np.array([((x.T @ y[rng.permutation(len(y))]) ** 2).sum() for _ in range(rounds)])
    return float((((x.T @ y) ** 2).sum() - null.mean()) / max(null.std(), 1e-12))


def nearest(a: np.ndarray, b: np.ndarray, itself: bool = True) -> np.ndarray:
    """Distance of each row of a [N, D] to its nearest row of b [M, D], root mean square over D. itself: False where b
    is a, and a row is no neighbour of itself."""
    square = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    if not itself:
        np.fill_diagonal(square, np.inf)
    return np.sqrt(square.min(axis=1).clip(0) / a.shape[1])


def coverage(real: np.ndarray, made: np.ndarray, k: int = 5) -> float:
    """Share of real rows in whose neighbourhood, as far as the k-th nearest real row, there is a made one (Naeem et al.
    2020, arXiv:2002.09797, eq. 8). Neighbourhoods are those of the real rows: of the made ones it would always be 1."""
    k = min(k, len(real) - 1)
    square = (real**2).sum(axis=1)[:, None] + (real**2).sum(axis=1)[None] - 2 * real @ real.T
    np.fill_diagonal(square, np.inf)
    radius = np.sqrt(np.sort(square, axis=1)[:, k - 1].clip(0) / real.shape[1])
    return float((nearest(real, made) <= radius).mean())
