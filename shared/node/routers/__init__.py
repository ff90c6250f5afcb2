"""What a node knows of its routers: who they are, which lives of them, and what it tells them."""
