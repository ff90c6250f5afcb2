"""Links over ZeroMQ, and the guards against what libzmq does: docs/zeromq.md names each guard's failure."""
