"""What the router knows of each open request, and what was learned from requests that ended badly."""
