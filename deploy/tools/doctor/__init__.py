"""`baton doctor`: the `look_*` modules gather facts, and the `check_*` modules, which are pure, judge them."""
