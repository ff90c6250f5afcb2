"""Programs beside a cluster: load test, planner, proof, doctor, draft heads. Serving code imports none of them."""
