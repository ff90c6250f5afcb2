"""Run one node's model in several processes. Rank 0 gives orders; the other ranks follow.

With tp, each rank has a part of the model. With dp, each rank has the whole model and some of the rows.
"""
