"""Workers that are Ray actors, on any node of a cluster. Nothing outside this folder imports Ray."""
