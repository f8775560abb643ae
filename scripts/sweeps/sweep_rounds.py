"""How often --repair auto sends lost packets again (lossynet/algorithm/rounds.c), where lost gradients are carried."""
import math

# No round up to so much lost; else until at most so much of the phase stays lost; at most so many.
GRADIENTS, PARAMETERS = (1 / 15, 1 / 80, 5), (0.12, 0.12, 2)


def sent_again(loss, budget=math.inf, limits=GRADIENTS):
    """The share of a phase's packets that rounds send, and the number of rounds (lossynet_rounds_at)."""
    left, again, rounds = loss, 0.0, 0
    few, enough, most = limits
    while loss > few and left > enough and rounds < most and again < budget:
        more = min(left, budget - again)
        left, again, rounds = left - more * (1 - loss), again + more, rounds + 1
    return again, rounds
