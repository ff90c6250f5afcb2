"""Programs that work beside a cluster: load test, planner, proof, doctor and head training.

The serving code imports none of them.
"""
