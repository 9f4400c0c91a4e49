"""Runs model-written code so that it can do no harm: in a locked process, in a locked fork, or in a container."""
