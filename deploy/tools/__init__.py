"""Programs beside a cluster: load test, planner, proof, doctor, head training. None is imported by what serves."""
