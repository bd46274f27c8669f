"""Linear least squares with non-negative coefficients, for many designs at once, in closed form.

Legend: P designs (candidate exponents), n observations, k features.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# A feature whose part orthogonal to the others is smaller than this share of it is dependent.
_DEPENDENT = 1e-10


class Solution(NamedTuple):
    """Intercepts [P], non-negative coefficients [P, k] and sums of squared residuals [P]."""

    intercept_P: Array
    coefficients_Pk: Array
    rss_P: Array


def nonnegative(features_Pnk: Array, target_n: Array, intercept: bool) -> Solution:
    """Minimises ``|target - intercept - features @ coefficients|^2``, coefficients >= 0.

    The problem is convex, so its solution is the unconstrained solution on its own support: of
    the 2^k subsets of features, the one with all coefficients non-negative and the smallest
    residual. Enumerating them costs a few array operations for all P designs together, where an
    iterative solver would be called P times. A subset with linearly dependent features is never
    needed: a smaller one reaches the same residual.

    Args:
      features_Pnk: float64 [P, n, k], k small.
      target_n: float64 [n].
      intercept: whether a free intercept is fitted; otherwise it is 0.
    """
    mean = float(target_n.mean()) if intercept else 0.0
    means_Pk = features_Pnk.mean(axis=1) * float(intercept)
    centred_kPn = np.ascontiguousarray(np.moveaxis(features_Pnk - means_Pk[:, None], -1, 0))
    target_n = target_n - mean
    best_Pk, best_rss_P, feasible_P = _on_subset(centred_kPn, target_n)
    # All features together with coefficients >= 0 are the solution; most designs end here.
    rest_Q = np.flatnonzero(~feasible_P)
    if len(rest_Q):
        best_Pk[rest_Q], best_rss_P[rest_Q] = _best_subset(centred_kPn[:, rest_Q], target_n)
    return Solution(mean - (means_Pk * best_Pk).sum(axis=1), best_Pk, best_rss_P)


def _best_subset(centred_kQn: Array, target_n: Array) -> tuple[Array, Array]:
    """Coefficients [Q, k] and residual [Q] of the best proper subset of features, or of none."""
    k, designs, _ = centred_kQn.shape
    best_rss_Q = np.full(designs, float(target_n @ target_n))
    best_Qk = np.zeros((designs, k))
    for size in range(1, k):
        for subset in itertools.combinations(range(k), size):
            solved_Qs, rss_Q, feasible_Q = _on_subset(centred_kQn[list(subset)], target_n)
            better_Q = feasible_Q & (rss_Q < best_rss_Q)
            best_rss_Q = np.where(better_Q, rss_Q, best_rss_Q)
            candidate_Qk = np.zeros((designs, k))
            candidate_Qk[:, subset] = solved_Qs
            best_Qk = np.where(better_Q[:, None], candidate_Qk, best_Qk)
    return best_Qk, best_rss_Q


def _on_subset(features_sPn: Array, target_n: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Unconstrained solution [P, s], its residual [P], whether it is unique and non-negative [P].

    Modified Gram-Schmidt: normal equations would square the condition number, and the reward and
    the penalty of the law are both nearly a function of K alone.
    """
    size, designs, n = features_sPn.shape
    upper = np.zeros((size, size, designs))
    projected = np.zeros((size, designs))
    solvable_P = np.ones(designs, bool)
    residual_Pn = np.broadcast_to(target_n, (designs, n))
    bases: list[Array] = []
    for j, column_Pn in enumerate(features_sPn):
        length_P = np.sqrt(np.einsum("pn,pn->p", column_Pn, column_Pn))
        for i, basis_Pn in enumerate(bases):
            upper[i, j] = np.einsum("pn,pn->p", basis_Pn, column_Pn)
            column_Pn = column_Pn - upper[i, j][:, None] * basis_Pn
        upper[j, j] = np.sqrt(np.einsum("pn,pn->p", column_Pn, column_Pn))
        independent_P = (upper[j, j] > _DEPENDENT * length_P) & (upper[j, j] > 0)
        solvable_P &= independent_P
        upper[j, j] = np.where(independent_P, upper[j, j], 1.0)
        bases.append(column_Pn / upper[j, j][:, None])
        projected[j] = np.einsum("pn,pn->p", bases[j], residual_Pn)
        residual_Pn = residual_Pn - projected[j][:, None] * bases[j]
    solved = np.zeros((size, designs))
    for j in reversed(range(size)):
        above = np.einsum("ip,ip->p", upper[j, j + 1 :], solved[j + 1 :])
        solved[j] = (projected[j] - above) / upper[j, j]
    feasible_P = solvable_P & (solved >= 0).all(axis=0)
    return solved.T.copy(), np.einsum("pn,pn->p", residual_Pn, residual_Pn), feasible_P
