"""Runs what a model wrote so that it can do no harm: in a locked process, a fork of one, or a container."""
