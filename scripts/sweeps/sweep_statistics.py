"""What a few paired changes allow to say of their mean: its interval, and whether it is shown to be near 0."""
import math

# Margins in percent of perplexity, within which a change counts as none.
MARGINS = (0.5, 1.0)


def mean_and_error(values):
    """The mean of two or more values, and its standard error."""
    n = len(values)
    mean = sum(values) / n
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def interval(values):
    """Half the width of the 95% confidence interval of the mean (Student's t); None below two values."""
    if len(values) < 2:
        return None
    from scipy import stats  # slow to import, and needed only where a table is written
    return float(stats.t.ppf(0.975, len(values) - 1)) * mean_and_error(values)[1]


def power(n, deviation, margin):
    """The probability that n changes with this standard deviation and a true mean of 0 are shown to be within
    the margin. The mean and the deviation that n values show are independent, so this averages over the second."""
    import numpy
    from scipy import stats
    shares = (numpy.arange(1000) + 0.5) / 1000
    error = deviation * numpy.sqrt(stats.chi2.ppf(shares, n - 1) / (n - 1) / n)
    room = numpy.maximum(0, margin - stats.t.ppf(0.95, n - 1) * error)
    return float(numpy.mean(2 * stats.norm.cdf(room * math.sqrt(n) / deviation) - 1))


def seeds_needed(deviation, margin, wanted=0.9, most=100000):
    """The least number of seeds with which power() is `wanted`; `most` if it takes as many."""
    low, high = 1, 2
    while high < most and power(high, deviation, margin) < wanted:
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, deviation, margin) >= wanted else (middle, high)
    return high


def equivalence(values):
    """Two one-sided tests at 5% (Schuirmann 1987): the mean is shown to be within a margin of 0 if its 90%
    interval is. Returns the ends "low" and "high" of that interval, the smallest of MARGINS that it is "within",
    and the "seeds_needed" for each of them: for a power of 0.9 if the true mean is 0. None, or nothing, where
    there are fewer than two different values."""
    error = mean_and_error(values)[1] if len(values) > 1 else 0
    if not error:
        return {"low": None, "high": None, "within": None, "seeds_needed": [""] * len(MARGINS)}
    from scipy import stats
    mean, half = sum(values) / len(values), float(stats.t.ppf(0.95, len(values) - 1)) * error
    deviation = error * math.sqrt(len(values))
    return {"low": mean - half, "high": mean + half,
            "within": next((margin for margin in MARGINS if abs(mean) + half < margin), None),
            "seeds_needed": [seeds_needed(deviation, margin) for margin in MARGINS]}
