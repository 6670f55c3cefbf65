"""SWE-bench: repositories with an issue each, repaired by an agent, judged by the repository's own tests."""
