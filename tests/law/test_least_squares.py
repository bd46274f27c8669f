import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from xmod_jax.law import least_squares


def _reference(features, target, intercept):
    """The same problem by SciPy's bounded solver, one design at a time."""
    columns = features.shape[1]
    design = np.column_stack([np.ones(len(target)), features]) if intercept else features
    lower = np.r_[[-np.inf] * intercept, [0.0] * columns]
    found = optimize.lsq_linear(design, target, (lower, np.inf), tol=1e-14, max_iter=1000)
    return found.x, 2 * found.cost


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(5, 30), st.booleans(), st.booleans()
)
def test_equals_scipy_on_random_problems(seed, columns, rows, intercept, correlated):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((6, rows, columns))
    if correlated:
        features = features[..., :1] + 0.1 * features
    target = rng.standard_normal(rows) + rng.integers(-2, 3)
    solution = least_squares.nonnegative(features, target, intercept)
    assert (solution.coefficients_Pk >= 0).all()
    for p in range(6):
        want, rss = _reference(features[p], target, intercept)
        assert solution.rss_P[p] == pytest.approx(rss, rel=1e-8, abs=1e-10)
        got = solution.coefficients_Pk[p]
        got = np.r_[solution.intercept_P[p], got] if intercept else got
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        residual = target - solution.intercept_P[p] - features[p] @ solution.coefficients_Pk[p]
        assert residual @ residual == pytest.approx(solution.rss_P[p], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("intercept", [True, False])
def test_dependent_or_empty_features_give_finite_solutions(intercept):
    column = np.arange(1.0, 8.0)
    twins = np.stack([column, 2 * column], axis=-1)[None]
    solution = least_squares.nonnegative(twins, 3 * column, intercept)
    assert solution.rss_P[0] == pytest.approx(0, abs=1e-18)
    zeros = least_squares.nonnegative(np.zeros((2, 7, 2)), 3 * column, intercept)
    assert np.isfinite(zeros.rss_P).all() and (zeros.coefficients_Pk == 0).all()


def test_all_coefficients_at_their_bound():
    column = np.arange(1.0, 8.0)
    features = np.stack([column, column**2], axis=-1)[None]
    solution = least_squares.nonnegative(features, -column, True)
    assert (solution.coefficients_Pk == 0).all()
    assert solution.intercept_P[0] == pytest.approx(-column.mean())
