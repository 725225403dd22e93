"""What inner products of gradients say: whether a loss on stale data points where a fresh gradient does."""

from dataclasses import dataclass

import numpy as np

from freshper_lightning.study.bootstrap import Estimate, Floats, Indices, counts, estimate
from freshper_lightning.study.gradients import Products


@dataclass(frozen=True, eq=False)
class Draws:
    """How often each of ``n`` groups is taken, in each of ``R`` samples."""

    counts: Floats
    """float64 [R, n]."""
    pairs: float
    """One over the expected product of the counts of two different groups: n / (n - 1) in a bootstrap sample."""

    @classmethod
    def once(cls, groups: int) -> "Draws":
        """Every group once."""
        return cls(np.ones((1, groups)), 1.0)

    @classmethod
    def of(cls, samples: Indices) -> "Draws":
        """Bootstrap samples [R, n]."""
        groups = samples.shape[1]
        return cls(counts(samples), groups / (groups - 1))

    def between(self, products: Floats, other: "Draws") -> Floats:
        """[R]: product of the sums of two disjoint sets of groups, for the products [n, m] of their gradients."""
        return _forms(self.counts, products, other.counts)

    def apart(self, products: Floats) -> Floats:
        """[R]: sum of the products [n, n] over pairs of different groups.

        A group that a bootstrap sample has twice is no second witness of the signal: its product with itself is left
        out, as it is of every other group.
        """
        own = self.counts**2 @ np.diag(products)
        return np.asarray(self.pairs * (_forms(self.counts, products, self.counts) - own))

    def norms(self, products: Floats) -> Floats:
        """[R]: norm of the sum over groups, noise included.

        The product of a group with itself counts once for each time that it was drawn. Squared, as in the norm of the
        sample's own sum, it would have every replicate take twice the noise for signal.
        """
        return np.asarray(np.sqrt(self.apart(products) + self.counts @ np.diag(products)))

    def expected_squares(self, products: Floats) -> Floats:
        """[R]: unbiased estimate of the square of the norm that the sum over groups has in expectation."""
        groups = self.counts.shape[1]
        return np.asarray(self.apart(products) * (groups / (groups - 1)))


def _forms(left: Floats, products: Floats, right: Floats) -> Floats:
    return np.asarray(((left @ products) * right).sum(1))


@dataclass(frozen=True, eq=False)
class Sampling:
    """One sampling of the probe's groups and, apart, of each half of the fresh ones."""

    probe: Draws
    halves: tuple[Draws, Draws]

    def of_halves(self, products: Floats) -> tuple[Floats, Floats]:
        """Norms [R] of the gradients of the halves, for the products [2 n, 2 n] of all fresh groups."""
        size = len(products) // 2
        one, other = self.halves
        return one.norms(products[:size, :size]), other.norms(products[size:, size:])

    def between_halves(self, products: Floats) -> Floats:
        """[R]: product of the gradients of the halves, an unbiased estimate of the squared norm of what both expect."""
        size = len(products) // 2
        return self.halves[0].between(products[:size, size:], self.halves[1])

    def with_halves(self, cross: Floats) -> tuple[Floats, Floats]:
        """[R]: products of the probe's gradient and that of each half, for the products [n, 2 n] of groups."""
        size = cross.shape[1] // 2
        one, other = self.halves
        return self.probe.between(cross[:, :size], one), self.probe.between(cross[:, size:], other)


@dataclass(frozen=True, eq=False)
class Alignment:
    """Compares gradients on ``n`` groups of the probe with those on as many fresh ones, twice.

    Args:
        groups: n.
        samples: int64 [R, n] for the probe and for each half of the fresh groups: bootstrap samples.
    """

    groups: int
    samples: tuple[Indices, Indices, Indices]

    def _samplings(self) -> tuple[Sampling, Sampling]:
        once = Draws.once(self.groups)
        probe, one, other = (Draws.of(samples) for samples in self.samples)
        return Sampling(once, (once, once)), Sampling(probe, (one, other))

    def of_loss(self, products: Products) -> dict[str, Estimate]:
        """``cosine`` and ``norm_ratio`` to the fresh gradient, means over its halves, and ``direction``.

        ``direction`` is the cosine of the *expected* gradients, whose norms are estimated from pairs of different
        groups, so that noise does not lower it; it can exceed 1, and is NaN where noise hides a norm.
        """
        point, replicates = (_compare(products, sampling) for sampling in self._samplings())
        return {name: estimate(float(value[0]), replicates[name]) for name, value in point.items()}

    def ceiling(self, fresh: Floats) -> Estimate:
        """Cosine of the gradients of the two fresh halves [2 n, 2 n]: what a probe of age 0 reaches in expectation."""
        point, replicates = (_ceiling(fresh, sampling) for sampling in self._samplings())
        return estimate(float(point[0]), replicates)


def _compare(products: Products, sampling: Sampling) -> dict[str, Floats]:
    shared = sampling.with_halves(products.cross)
    with np.errstate(invalid="ignore", divide="ignore"):  # a loss may have no gradient left
        norm, halves = sampling.probe.norms(products.probe), sampling.of_halves(products.fresh)
        cosines = [value / (norm * size) for value, size in zip(shared, halves, strict=True)]
        # Root by root: of two estimates below 0 the product would pass for a norm.
        own, fresh = sampling.probe.expected_squares(products.probe), sampling.between_halves(products.fresh)
        direction = np.mean(shared, axis=0) / (np.sqrt(own) * np.sqrt(fresh))
    return {
        "cosine": np.mean(cosines, axis=0),
        "norm_ratio": norm / np.mean(halves, axis=0),
        "direction": direction,
    }


def _ceiling(fresh: Floats, sampling: Sampling) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        one, other = sampling.of_halves(fresh)
        return np.asarray(sampling.between_halves(fresh) / (one * other))
