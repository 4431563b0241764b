"""Is the measuring itself right? Known answers, put to the measures and to an extractor."""

import math
from typing import NamedTuple

import numpy as np

from sd import measures
from sd.extractors import Extractor


class Answer(NamedTuple):
    question: str
    found: float
    wanted: float
    tolerance: float  # absolute

    @property
    def right(self) -> bool:
        return bool(abs(self.found - self.wanted) <= self.tolerance)


def gaussian(n: int, d: int, seed: int, scale=1.0, shift=0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)) * scale + shift


def frechet_answers() -> list[Answer]:
    fd = measures.frechet_distance

    def by_moments(x, y):
        return measures.frechet(measures.moments(x), measures.moments(y))

    x, y = gaussian(300, 16, 0), gaussian(300, 16, 1, 1.5, 0.2)
    few = gaussian(20, 64, 2)  # fewer pictures than features: singular covariances
    few2 = gaussian(30, 64, 5, 2.0, 0.1)
    size = float(np.trace(measures.moments(few)[1]))
    answers = [
        Answer("FD of a set with itself", fd(x, x), 0, 1e-9),
        Answer("FD of fewer pictures than features with themselves", fd(few, few), 0, 1e-9 * size),
        Answer("FD of that set and the set moved by 1 along each of 64 axes", fd(few, few + 1), 64, 1e-7 * size),
        Answer("FD of few pictures, by their covariances", by_moments(few, few2), fd(few, few2), 1e-7 * size),
        Answer("FD the other way round", fd(y, x), fd(x, y), 1e-9),
        Answer("FD of the rows in another order", fd(x[::-1], y), fd(x, y), 1e-9),
    ]
    # Diagonal covariances commute: |m1 - m2|^2 + |sqrt(C1) - sqrt(C2)|^2.
    a, b, moved = np.array([4.0, 1.0, 0.25]), np.array([1.0, 1.0, 9.0]), np.array([1.0, -2.0, 0.5])
    wanted = float(np.square(moved).sum() + np.square(np.sqrt(a) - np.sqrt(b)).sum())
    found = measures.frechet((moved, np.diag(a)), (np.zeros(3), np.diag(b)))
    answers.append(Answer("FD of two Gaussians whose covariances commute", found, wanted, 1e-9))
    # Of 2 x 2 matrices: tr sqrt(M) = sqrt(tr M + 2 sqrt(det M)).
    a, b = np.array([[2.0, 0.9], [0.9, 1.0]]), np.array([[1.0, -0.4], [-0.4, 3.0]])
    cross = math.sqrt(np.trace(a @ b) + 2 * math.sqrt(np.linalg.det(a @ b)))
    found = measures.frechet((np.zeros(2), a), (np.zeros(2), b))
    wanted = float(np.trace(a) + np.trace(b) - 2 * cross)
    answers.append(Answer("FD of two Gaussians whose covariances do not commute", found, wanted, 1e-9))
    # Each row twice: the mean stays, and n - 1 becomes 2 n - 1 for twice the squares.
    factor = math.sqrt(2 * (len(x) - 1) / (2 * len(x) - 1))
    wanted = (1 - factor) ** 2 * float(np.trace(measures.moments(x)[1]))
    answers.append(Answer("FD of a set and the set with every row twice", fd(x, np.repeat(x, 2, 0)), wanted, 1e-9))
    sampled = fd(gaussian(20_000, 4, 3), gaussian(20_000, 4, 4, 2.0, 1.0))
    answers.append(Answer("FD of 20,000 draws of two Gaussians, 8 in truth", sampled, 8, 0.4))
    return answers


def kernel_answers() -> list[Answer]:
    x, y = gaussian(12, 5, 0), gaussian(9, 5, 1, 1.3)

    def mean(p, q, kernel, itself):
        values = [kernel(a, b) for i, a in enumerate(p) for j, b in enumerate(q) if itself or i != j]
        return sum(values) / len(values)

    def cubic(a, b):
        return (float(a @ b) / 5 + 1) ** 3

    wanted = mean(x, x, cubic, False) + mean(y, y, cubic, False) - 2 * mean(x, y, cubic, True)
    answers = [Answer("KID's estimate, term by term", measures.cubic_mmd(x, y), wanted, 1e-9)]
    draws = [measures.cubic_mmd(gaussian(20, 8, 2 * s), gaussian(20, 8, 2 * s + 1)) for s in range(400)]
    error = float(np.std(draws) / math.sqrt(len(draws)))
    answers.append(Answer("KID of equal distributions, mean of 400: unbiased", float(np.mean(draws)), 0, 4 * error))
    try:
        measures.kid(x, y, size=10)
        refused = 0.0
    except ValueError:
        refused = 1.0
    answers.append(Answer("KID refuses subsets larger than a set", refused, 1, 0))

    def gauss(a, b):
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        return math.exp(-float(np.square(a - b).sum()) / 200)

    wanted = 1000 * (mean(x, x, gauss, True) + mean(y, y, gauss, True) - 2 * mean(x, y, gauss, True))
    answers.append(Answer("CMMD, term by term", measures.cmmd(x, y), wanted, 1e-7))
    answers.append(Answer("CMMD of a set with itself", measures.cmmd(x, x), 0, 1e-9))
    cosines = measures.clip_score(np.array([[1.0, 0], [3, 4], [1, 0]]), np.array([[2.0, 0], [0, 1], [-1, 0]]))
    answers.append(Answer("CLIP score of cosines 1, 0.8 and -1, which counts as 0", cosines, 60, 1e-9))
    return answers


def neighbour_answers() -> list[Answer]:
    k = 2
    real, fake = gaussian(30, 3, 0), gaussian(25, 3, 1, 1.2, 0.3)

    def far(a, b):
        return math.dist(a, b)

    def reach(rows):  # of each row to its k-th neighbour
        return [sorted(far(a, b) for j, b in enumerate(rows) if i != j)[k - 1] for i, a in enumerate(rows)]

    r, f = reach(real), reach(fake)
    in_real = [[far(a, b) < r[i] for i, a in enumerate(real)] for b in fake]
    in_fake = [[far(a, b) < f[j] for j, b in enumerate(fake)] for a in real]
    wanted = {
        "precision": np.mean([any(row) for row in in_real]),
        "recall": np.mean([any(row) for row in in_fake]),
        "density": np.mean([sum(row) for row in in_real]) / k,
        "coverage": np.mean(np.any(in_real, axis=0)),
    }
    found = measures.manifolds(real, fake, k)
    answers = [Answer(f"{name}, pair by pair", found[name], float(wanted[name]), 1e-12) for name in wanted]
    centres = 20.0 * np.eye(8)
    modes = np.concatenate([gaussian(50, 8, s) + centre for s, centre in enumerate(centres)])
    one = gaussian(400, 8, 99) + centres[0]
    answers.append(
        Answer("coverage of eight clusters by one of them", measures.manifolds(modes, one, 5)["coverage"], 0.125, 0.01)
    )
    copied = np.concatenate([real[[7, 3]], fake + 50])
    index, distance, own = measures.nearest(real, copied)
    answers.append(Answer("two copied rows are found", float((distance < own).sum()), 2, 0))
    answers.append(Answer("and whose copies they are", float(index[0] * 100 + index[1]), 703, 0))
    return answers


def extractor_answers(extractor: Extractor) -> list[Answer]:
    """The same features each time, alone and in a batch; other ones of another picture; bytes and nothing else."""
    pictures = np.random.default_rng(0).integers(0, 256, (5, 48, 48, 3), dtype=np.uint8)
    together = extractor(pictures)
    alone = np.concatenate([extractor(p[None]) for p in pictures])
    size = float(np.abs(together).max())
    try:
        extractor(pictures / np.float32(255))
        refused = 0.0
    except ValueError:
        refused = 1.0
    name = extractor.name
    answers = [
        Answer(f"{name}, twice the same", float(np.abs(extractor(pictures) - together).max()), 0, 0),
        Answer(f"{name}, one picture at a time", float(np.abs(alone - together).max()), 0, 1e-4 * size),
        Answer(f"{name} refuses pictures of floats", refused, 1, 0),
    ]
    apart = float(np.abs(together[0] - together[1]).max() > 1e-6 * size)
    return [*answers, Answer(f"{name} tells pictures apart", apart, 1, 0)]


def check(extractor: Extractor) -> list[Answer]:
    """All answers."""
    return [*frechet_answers(), *kernel_answers(), *neighbour_answers(), *extractor_answers(extractor)]
