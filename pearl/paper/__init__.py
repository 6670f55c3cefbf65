"""The source's evaluation (arXiv 2609.35158), replayed in the simulator and compared cell by cell."""
