"""What a node has to do with its machine: cores, files, ports."""
