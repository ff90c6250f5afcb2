"""Programs beside a cluster: load test, planner, proof, doctor, head training. Serving code imports none of them."""
