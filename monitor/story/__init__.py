"""The story after the fact: a request, a step, two ranks, as the recordings tell them."""
