"""Built-in task families."""
