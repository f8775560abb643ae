"""Checks the identities of lossynet/algorithm/theory.md with random masks, for p = 0.1 and 0.3."""
import numpy as np
import pytest

ELEMENTS, STEPS = 200_000, 60
RATES = (0.1, 0.3)


def changes(kind, rng):
    """Changes of the model, step by step, the same for all elements: STEPS numbers."""
    if kind == "independent":
        return rng.normal(size=STEPS)
    if kind == "equal":
        return np.ones(STEPS)
    steps = np.zeros(STEPS)  # correlated, 0.9^k
    for t in range(STEPS):
        steps[t] = 0.9 * steps[t - 1] + np.sqrt(1 - 0.81) * rng.normal() if t else rng.normal()
    return steps


def replicas(steps, p, rng, rule):
    """The distance r - x of ELEMENTS replicas with independent masks after all steps."""
    x, r = 0.0, np.zeros(ELEMENTS)
    for step in steps:
        x += step
        arrives = rng.random(ELEMENTS) >= p
        if rule == "plain":
            r = np.where(arrives, x, r)
        elif rule == "lead":
            r = np.where(arrives, x + p / (1 - p) * step, r)
        else:
            r = r + arrives * (x - r) / (1 - p)
    return r - x


def past(steps, p, power):
    """The sum over k of p^(k+1) |step k steps ago|^power, with signs if power is 1."""
    return sum(p ** (k + 1) * step ** power for k, step in enumerate(steps[::-1]))


def near(values, expected):
    """Whether the mean of independent values is what is expected, within five standard errors."""
    error = values.std() / np.sqrt(len(values))
    assert abs(values.mean() - expected) < 5 * error + 1e-9, (values.mean(), expected, error)


@pytest.mark.parametrize("p", RATES)
def test_a_broadcast_contracts(p):
    rng = np.random.default_rng(1)
    v = rng.normal(size=ELEMENTS)  # x - r
    near((rng.random(ELEMENTS) < p) * v ** 2 / (v ** 2).mean(), p)


@pytest.mark.parametrize("p", RATES)
def test_ages_are_geometric_and_their_mean_is_the_penalty(p):
    age = -replicas(np.ones(STEPS), p, np.random.default_rng(2), "plain")
    near(age, p / (1 - p))
    for k in range(4):
        near((age == k).astype(float), (1 - p) * p ** k)


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("kind", ["independent", "correlated", "equal"])
def test_plain_replicas_lag_and_a_lead_and_corrections_remove_it(p, kind):
    rng = np.random.default_rng(3)
    steps = changes(kind, rng)
    near(replicas(steps, p, rng, "plain"), -past(steps, p, 1))
    near(replicas(steps, p, rng, "lead"), 0)
    near(replicas(steps, p, rng, "correct"), 0)


@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("kind", ["independent", "correlated", "equal"])
def test_the_distance_with_a_lead_knows_no_correlation(p, kind):
    rng = np.random.default_rng(4)
    steps = changes(kind, rng)
    mine, other = (replicas(steps, p, rng, "lead") for _ in range(2))
    near(mine ** 2, past(steps, p, 2) / (1 - p))
    near((mine - other) ** 2, 2 * past(steps, p, 2) / (1 - p))
    if kind == "equal":
        assert past(steps, p, 2) / (1 - p) == pytest.approx(p / (1 - p) ** 2)


@pytest.mark.parametrize("p", RATES)
def test_plain_distance_of_independent_steps(p):
    """Each element has steps of its own here, so that the mean over elements is that over steps as well."""
    rng = np.random.default_rng(5)
    x, r = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    for _ in range(STEPS):
        x = x + rng.normal(size=ELEMENTS)
        r = np.where(rng.random(ELEMENTS) >= p, x, r)
    near((r - x) ** 2, p / (1 - p))


@pytest.mark.parametrize("p", RATES)
def test_correct_on_arrival_is_unbiased_and_farther_away(p):
    rng = np.random.default_rng(6)
    mask = rng.random(ELEMENTS) >= p
    near(mask / (1 - p), 1)
    near((mask / (1 - p) - 1) ** 2, p / (1 - p))
    near(replicas(np.ones(STEPS), p, rng, "correct") ** 2, p / (1 - 2 * p))
    assert p / (1 - 2 * p) > p / (1 - p) ** 2


def test_correct_on_arrival_is_unstable_at_a_half_and_the_lead_is_not():
    """Second moments, exactly: v <- p/(1-p) (v + 1) per step, against (5)."""
    v = 0.0
    for _ in range(1000):
        v = 0.5 / 0.5 * (v + 1)
    assert v == 1000 and past(np.ones(1000), 0.5, 2) / 0.5 == pytest.approx(2)


@pytest.mark.parametrize("p", RATES)
def test_balanced_is_unbiased_and_the_mean_favours_the_owner(p):
    """Worker i has the gradient i; worker 0 is the owner."""
    rng, N = np.random.default_rng(7), 8
    arrived = rng.random((ELEMENTS, N - 1)) >= p
    some = arrived.any(axis=1)  # balanced promises nothing where nothing arrives
    near((arrived[some] * np.arange(1, N)).sum(axis=1) / arrived[some].sum(axis=1), N / 2)
    near(1 / (1 + arrived.sum(axis=1)), (1 - p ** N) / (N * (1 - p)))


@pytest.mark.parametrize("p", RATES)
def test_carried_gradients_count_once_and_late(p):
    rng = np.random.default_rng(8)
    kept, averaged, late = np.zeros(ELEMENTS), np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    waiting = np.zeros(ELEMENTS)  # gradients of 1 that wait
    for _ in range(STEPS):
        kept, waiting = kept + 1, waiting + 1
        arrives = rng.random(ELEMENTS) >= p
        averaged += arrives * kept
        late += np.where(arrives, 0, waiting)  # each gradient that waits is one step later
        kept, waiting = np.where(arrives, 0, kept), np.where(arrives, 0, waiting)
    assert (averaged + kept == STEPS).all()
    near(late / STEPS, sum(p ** (k + 1) * (STEPS - k) for k in range(STEPS)) / STEPS)


@pytest.mark.parametrize("p", RATES)
def test_rounds_leave_a_power_of_the_rate(p):
    rng = np.random.default_rng(9)
    for rounds in (1, 2):
        lost, sent = rng.random(ELEMENTS) < p, np.zeros(ELEMENTS)
        for _ in range(rounds):
            sent += lost
            lost = lost & (rng.random(ELEMENTS) < p)
        near(lost.astype(float), p ** (rounds + 1))
        near(sent, sum(p ** k for k in range(1, rounds + 1)))
