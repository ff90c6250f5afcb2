"""`baton ray`: a cluster's processes, each beside an actor that starts, watches and stops it. Ray sees no request."""
