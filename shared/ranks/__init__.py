"""Several processes that run one node's model. Rank 0 orders and the others follow.

tp: each has a part of the model. dp: each has the whole model and some of the rows.
"""
