"""What the router knows of each node: its Hello, its newest report, and what the router measured itself."""
