"""The formula in 50 digits: what every probability is compared with."""

from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import reduce

EXACT = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN)
CAN_VANISH = Decimal("1e-290")


def exponential(tau):
    return lambda age: -EXACT.divide(age, Decimal(tau))


def inverse(age):
    return -EXACT.ln(1 + age)


def window(max_age):
    return lambda age: Decimal(0) if age <= Decimal(max_age) else None


def no_decay(age):
    return Decimal(0)


def exact_probabilities(entries, now, alpha, log_decay):
    """Probabilities of (base, log fresh, since); ``log_decay`` of an age is None where nothing is left."""
    powers = []
    for base, log_fresh, since in entries:
        faded = log_decay(Decimal(now) - Decimal(since))
        if base == 0 or log_fresh == float("-inf") or faded is None:
            powers.append(Decimal(0))
            continue
        log_priority = EXACT.add(EXACT.add(EXACT.ln(Decimal(base)), Decimal(log_fresh)), faded)
        powers.append(EXACT.exp(EXACT.multiply(Decimal(alpha), log_priority)))
    total = reduce(EXACT.add, powers, Decimal(0))
    return [EXACT.divide(power, total) if total else Decimal(0) for power in powers]


def exact_weights(shares, beta):
    """Over the maximum, for probabilities above 0."""
    logs = [EXACT.ln(share) for share in shares]
    return [EXACT.exp(EXACT.multiply(Decimal(beta), EXACT.subtract(min(logs), log))) for log in logs]


def assert_exact(probabilities, expected):
    """Relative 1e-12 above 1e-290, and 0 below."""
    for got, true in zip(probabilities.tolist(), expected, strict=True):
        if true > Decimal("1.000001") * CAN_VANISH:
            assert abs(EXACT.divide(EXACT.subtract(Decimal(got), true), true)) <= Decimal("1e-12"), (got, true)
        elif true < Decimal("0.999999") * CAN_VANISH:
            assert got == 0, (got, true)
