"""What the kernels of a thinking budget share.

A request may think for a number of tokens at most. Thinking begins behind the last start marker, if no end marker
follows. Once the budget is spent, the tokens of the forced end marker get a logit that no other can reach.
"""

FORCED = 1.0e9  # vLLM's logit for a forced token
NOWHERE = -1  # the place of a marker that a request does not have
