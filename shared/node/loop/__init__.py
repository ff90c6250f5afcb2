"""A node's rounds: messages in, actions out, and the daemon that polls and sends."""
