"""How often --repair auto sends lost packets again (lossynet/algorithm/rounds.c), where lost gradients are carried."""
import math

FEW, MOST = 1 / 15, 2  # no round up to FEW lost; at most so many rounds
GRADIENTS, PARAMETERS = 1 / 40, 0.22  # else until at most so much of the phase stays lost


def sent_again(loss, budget=math.inf, enough=GRADIENTS):
    """The share of a phase's packets that rounds send, and the number of rounds (lossynet_rounds_at)."""
    left, again, rounds = loss, 0.0, 0
    while loss > FEW and left > enough and rounds < MOST and again < budget:
        more = min(left, budget - again)
        left, again, rounds = left - more * (1 - loss), again + more, rounds + 1
    return again, rounds
