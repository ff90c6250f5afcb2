"""Run one node's model in several processes.

With tp, each rank has a part of the model. With dp, each rank has the whole model and some of the rows.
"""
