"""EPlane: the ground that controller, agent, runtime and API share. Words and records; pure, but for the store."""

__version__ = "0.1.0"
